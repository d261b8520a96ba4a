"""Rank 0's event loop: sender, receiver and their channels."""
