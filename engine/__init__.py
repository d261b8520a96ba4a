"""The model, its paged KV cache and the executor that runs steps. No text, network or roles.

Wings, in reading order:

    batch, config       one step as values; the settings of an engine
    executor            what workers drive; builds the engine for a CPU or a GPU
    kv/                 block allocator, KV tensors, pool sizing
    model/              checkpoint, weights of a rank, forward pass
    quantization/       quantised matrices as values
    cpu/                one rank on a CPU
    ranks/              tensor parallelism: several processes run the same steps
    kernels/            operations of a device; skip at first reading
    cuda/               one rank on a GPU: CUDA graphs, steps planned ahead
    torch_private       names of torch that are not public
"""
