"""One rank of an engine on an NVIDIA GPU: triton kernels and cuBLAS, under CUDA graphs.

Files, in reading order:

    options       settings; the shapes that steps are rounded up to
    plan          a step in device order: rows, query tiles, calls, as frozen values
    inputs        the plan's numbers in device memory, at fixed addresses
    splits        how the contexts of decode rows are cut
    attention     attention of decode rows, of mixed steps, of large chunks; dense: by cuDNN
    model         the forward pass
    products/     its products: of some dozens of rows with the norms, of quantised weights
    sampler       from logits to tokens that stay on the device
    runner        loads a rank, plans and submits steps; pending: their results
    staging       streams, graphs by shape, pinned buffers
    comm, group   sums over ranks: the interface; symmetric memory and NCCL
    memory, warmup, build   pool size, compilation, construction
"""
