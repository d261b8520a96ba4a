"""Quantised weights as values, for loaders and kernels of every device.

weight: codes, scales and zero points of one matrix, in one layout for all checkpoint formats.
nibbles: 4-bit codes, two to a byte.
at_load: quantises matrices of an unquantised checkpoint.
"""
