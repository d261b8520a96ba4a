"""Typed wrappers of the Triton kernels in `engine.kernels.jit`."""
