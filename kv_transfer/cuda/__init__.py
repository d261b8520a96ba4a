"""What the GPU backends share.

- driver: calls of the CUDA driver; compiles and launches kernels
- copying: the paged copy
- nccl: communicator of two ranks, deadlines, staging budget
"""
