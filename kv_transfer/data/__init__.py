"""The threads of every rank: links, and the messages that move on them.

- rank_commands: what rank 0 tells a data plane, and the results
- data_plane: carries commands out
- link_thread: one incarnation of a link; blocks over a link that carries bytes (tcp)
- threads: a thread that calls functions in order

Threads (all but the last two kinds are SerialThreads):

    kv-<link>         each link       opens it and begins its messages in order; with tcp it also
                                      copies, and blocks until a message is over
    kv-done-<link>    each NCCL link  waits for the messages that kv-<link> began
    kv-write-<n>      4 a rank        waits for cuda_ipc writes on CUDA stream n, which callers of
                                      DataPlane.submit began
    kv-layer-<n>      each layer      waits until a step of the engine has written layer n
    kv-accept         each backend    accepts connections (backends.rendezvous)
    kv-handshake      each connection authenticates it, for at most 5 s
    kv-nccl-watch,    each backend,   end NCCL calls at their deadline (cuda.nccl)
    kv-abort-<link>   each abort
"""
