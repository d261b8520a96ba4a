"""The engine on NVIDIA GPUs: the same Executor as on a CPU, over triton kernels and CUDA graphs."""
