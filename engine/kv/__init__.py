"""Paged KV cache of one engine.

allocator: states, references and content names of blocks; pure Python.
tables: the blocks of one sequence, by KV group.
pool: the tensors, copies of slices of them for transfers, and CUDA events that tell how far a
    step's KV is written.
sizing: number of blocks, layout, fingerprint.
"""
