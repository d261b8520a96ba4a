"""Models of the Llama family: configuration, split over ranks, weights, forward pass.

config: parses config.json, refuses what is not served.
sharding: which heads, columns and vocabulary rows each rank holds.
checkpoint: reads slices of tensors from safetensors files.
weights: the weights of one rank, fused where they share an input.
rotary, parallel: position tables; layers split over ranks.
llama: the forward pass.
"""
