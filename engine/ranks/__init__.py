"""Tensor-parallel ranks of one engine: rank 0's group, followers, collectives."""
