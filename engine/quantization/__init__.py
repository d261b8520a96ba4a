"""Quantised weights as values, for loaders and kernels of every device.

weight: codes, scales and zero points of one matrix, in one layout for all checkpoint formats.
at_load: quantises matrices of an unquantised checkpoint.
"""
