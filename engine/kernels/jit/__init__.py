"""Triton sources. Call them through the typed wrappers in engine.kernels.triton_*."""
