"""What the GPU backends share: the paged copy, the driver's and NCCL's entry points."""
