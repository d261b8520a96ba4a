"""Decoder models: configuration, split over ranks, weights, forward pass.

families: served architectures; what the config.json of each family means.
config, reading, rope: a decoder's configuration and how it is read.
kv_groups: layers that share block tables.
sharding: which heads, columns and vocabulary rows each rank holds.
formats: quantised checkpoints.
checkpoint, digest: slices of tensors from safetensors files; a name of their content.
matrices: readers of matrices, as they are or quantised.
kv_scales: what a calibrated checkpoint divides keys and values by.
weights: the weights of one rank, fused where they share an input.
rotary: position tables.
decoder: the forward pass, layers split over ranks.
"""
