"""Holds named KV blocks beyond the pool of the GPU: in host memory and on disk.

A block's name is its digest in the chain of its sequence (protocol.kv_layout), so it means the same
to every process and after a restart. The step thread decides what is copied where and keeps the
books (worker_runtime.scheduling.kv_tiers); every rank copies its slice in threads of its own.

config: sizes.
commands: what the step thread tells the ranks to copy, and what came of it.
slots: pure: the slots of host memory, who reads or fills them, which one goes next.
cost: pure: measured rates, and when a load beats computing.
memory: one rank's host memory, and copies between it and the pool.
disk: files of segments: checked when read, renamed into place, bounded in size.
rank_tiers: the threads of one rank.

Ways of a block:

    pool  --store-->  slot  --write-->  file      when it gets its name
    pool  <--load---  slot  <--read---  file      when a prompt begins with it

A copy holds what it reads and what it writes until it has ended, whatever became of the request: a
block stays referenced, a slot leased. Nothing is promised before that.
"""
