"""Moves the KV cache of a prompt from a prefill worker to a decode worker. Knows no models or
schedulers.

Wings, each a layer that imports only those below it:

    control   rank 0's event loop: hand-offs, channels, calls to peer workers
    data      the threads of every rank: links and the messages on them
    backends  tcp, cuda_ipc and nccl, one contract
    cuda      paged copy, driver, NCCL
    plan      pure: which bytes go where, life cycles, the protocol of a channel
    config    settings

Words:

    hand-off     one attempt of one request: its KV goes from prefill to decode
    epoch        one run of a worker process
    generation   one grant of decode's blocks to a hand-off
    channel      all links from one prefill worker to one decode worker
    incarnation  one build of a channel: it is renewed whole, under the next number
    link         the connection of two ranks within a channel
    piece        cells x layers of a hand-off, announced by one message
    turn         the place of an announcement in the order of its channel
    message      what one rank sends to one other rank of a piece

A hand-off:

    prefill                         decode
       | <------------ Grant ----------- |   blocks are reserved, under a generation
       | ----- Piece (announcement) ---> |   receives are posted on every rank
       | <------------- Ack ------------ |
       | ===== bytes, rank to rank ====> |
       |        ... more pieces ...      |
       | ------------ Commit ----------> |   every piece arrived: decode owns the sequence
       | <------------- Ack ------------ |   prefill frees its blocks

Over CUDA IPC pieces are not announced: the grant allows prefill to write, and the commit lists
the pieces. Either worker may send HandoffEnd instead of a commit.
"""
