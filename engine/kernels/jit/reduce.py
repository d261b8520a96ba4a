# mypy: ignore-errors
"""All-reduce of a small tensor by stores into the peers' memory, data and flag in one word."""

import triton
import triton.language as tl

from engine.kernels.jit.elementwise import pdl_wait


@triton.jit
def halves(word):
    """The two bfloat16 of an int32, low half first, as float32."""
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def bf16_bits(value):
    """float32 to the 16 bits of its bfloat16, in an int32."""
    return value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def push_all_reduce(
    partial,
    out,
    mailboxes,
    epochs,
    failed,
    num_words,
    max_polls,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = the sum over ranks of `partial`, both bfloat16 seen as int32 words of two.

    mailboxes: int64 addresses of every rank's mailbox, int64 `[2, SIZE, CAPACITY]`. A word travels
    with the number of the reduction it belongs to, in one eight-byte store, so that the reader
    needs no other signal (the idea of NCCL's low-latency protocol). Two slots are used in turn: a
    slot is written again only after the peers' words of the reduction between have arrived, hence
    after they have read it. epochs: int32, one counter a program; every rank must reduce the same
    sizes in the same order. After `max_polls` looks at a silent peer the wait is given up,
    and `failed` is set.
    """
    pdl_wait(PDL)
    pid = tl.program_id(0)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_words
    epoch = tl.load(epochs + pid) + 1
    slot = (epoch & 1) * SIZE
    word = tl.load(partial + at, mask=ok, other=0)
    packed = (epoch.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            box = tl.load(mailboxes + peer).to(tl.pointer_type(tl.int64))
            tl.store(box + (slot + RANK) * CAPACITY + at, packed, mask=ok)
    mine = tl.load(mailboxes + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            part = word
        else:
            box = mine + (slot + peer) * CAPACITY + at
            got = tl.load(box, mask=ok, other=0, volatile=True)
            missing = tl.sum((ok & ((got >> 32) != epoch)).to(tl.int32), axis=0)
            polls = 0
            while (missing > 0) & (polls < max_polls):
                got = tl.load(box, mask=ok, other=0, volatile=True)
                missing = tl.sum((ok & ((got >> 32) != epoch)).to(tl.int32), axis=0)
                polls += 1
            if missing > 0:
                tl.store(failed, 1)
            part = got.to(tl.int32)
        part_low, part_high = halves(part)
        low += part_low
        high += part_high
    tl.store(out + at, bf16_bits(low) | (bf16_bits(high) << 16), mask=ok)
    tl.store(epochs + pid, epoch)
