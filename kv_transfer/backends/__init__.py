"""How bytes travel between two ranks.

- base: the contract of backends, links and KV pools
- host: which host and process a peer is
- choice: the backends of a rank, and the one that a pair of workers uses
- rendezvous: a TCP connection on which two ends build their link
- tcp: between CPUs
- nccl: between GPUs of any hosts
- cuda_ipc: between GPUs of one host, the sender writes into the receiver's pool
"""
