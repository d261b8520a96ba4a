"""The model, its paged KV and the executor that runs steps. Knows no text, network or roles.

To read in this order:

    batch, local            one step as values, and a whole engine in one process that makes them
    executor                what workers drive; builds the engine of a CPU or a GPU
    kv/allocator, kv/pool   who owns which block of KV, and its tensors
    runner (with inputs)    one rank on a CPU: a batch laid out in rows and run
    model/, layers/         the forward pass, split over ranks (loader reads a rank's share)
    kernels/base            what it asks of a device: `reference` to be read, `cpu` and native/ to
                            be fast
    ranks, follower, tp     several processes that run the same steps
    cuda/                   all of it on GPUs (executor, runner, model, plan, graphs), over
                            kernels/triton_* and kernels/jit/
"""
