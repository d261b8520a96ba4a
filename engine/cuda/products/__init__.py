"""Products of one rank: numbers with the library, few rows and codes with the engine's own kernels.

Files, in reading order:

    matrices      the forms of matrices: numbers, or the codes of quantised ones
    single        one product with codes, of any number of rows
    split_decode  decode steps of some dozens of rows, norms within
    coded_steps   steps of many rows over codes
"""
