# mypy: ignore-errors
"""Sums over ranks by stores into the peers' memory: parts of the kernel that computes what is to be
summed, and a kernel that sums and takes the norm."""

import triton
import triton.language as tl

from engine.kernels.jit.elementwise import pdl_wait


@triton.jit
def wait_for_words(box, ok, epoch, max_polls, failed):
    """The words at `box` (a tile of pointers) once all carry `epoch`.

    After `max_polls` polls of a silent peer the wait ends, and `failed` is set.
    """
    got = tl.load(box, mask=ok, other=0, volatile=True)
    missing = tl.max((ok & ((got >> 32) != epoch)).to(tl.int32))
    polls = 0
    while (missing > 0) & (polls < max_polls):
        got = tl.load(box, mask=ok, other=0, volatile=True)
        missing = tl.max((ok & ((got >> 32) != epoch)).to(tl.int32))
        polls += 1
    if missing > 0:
        tl.store(failed, 1)
    return got


@triton.jit
def push_sums(sums, at, ok, mailboxes, epoch, CAPACITY, rank, SIZE: tl.constexpr):
    """Send float32 sums to every rank, this one included.

    mailboxes: int64 addresses of every rank's mailbox, int64 `[2, SIZE, CAPACITY]`. A sum travels
    with the number of the reduction it belongs to, in one eight-byte store, so that the reader
    needs no other signal (the idea of NCCL's low-latency protocol). Two slots are used in turn: a
    slot is written again only after the peers have taken part in the reduction between, hence after
    they have read it.
    """
    bits = sums.to(tl.int32, bitcast=True).to(tl.int64)
    words = (epoch.to(tl.int64) << 32) | (bits & 0xFFFFFFFF)
    for peer in tl.static_range(SIZE):
        box = tl.load(mailboxes + peer).to(tl.pointer_type(tl.int64))
        tl.store(box + ((epoch & 1) * SIZE + rank) * CAPACITY + at, words, mask=ok)


@triton.jit
def collect_sums(
    h,
    at,
    count,
    mailboxes,
    epoch,
    failed,
    max_polls,
    CAPACITY,
    rank,
    SIZE: tl.constexpr,
    SIZE_P: tl.constexpr,
):
    """h[at] += what all ranks have pushed; the same bits on every rank if h was."""
    mine = tl.load(mailboxes + rank).to(tl.pointer_type(tl.int64))
    peers = tl.arange(0, SIZE_P)[:, None]
    ok = (peers < SIZE) & (at < count)[None, :]
    value = tl.load(h + at, mask=at < count, other=0.0).to(tl.float32)
    box = mine + ((epoch & 1) * SIZE + peers) * CAPACITY + at[None, :]
    got = wait_for_words(box, ok, epoch, max_polls, failed)
    parts = got.to(tl.int32).to(tl.float32, bitcast=True)
    value += tl.sum(tl.where(ok, parts, 0.0), axis=0)
    tl.store(h + at, value.to(h.dtype.element_ty), mask=at < count)


@triton.jit
def at_least(flags, ok, wanted, max_polls, failed):
    """Wait until all flags (a tile of pointers to int32 that count up) are `wanted` or more."""
    missing = 1
    polls = 0
    while (missing > 0) & (polls < max_polls):
        got = tl.atomic_add(flags, 0, mask=ok, sem="acquire", scope="sys")
        missing = tl.max((ok & (got - wanted < 0)).to(tl.int32))
        polls += 1
    if missing > 0:
        tl.store(failed, 1)


@triton.jit(do_not_specialize=["index", "max_polls", "rank", "rows"])
def sum_and_norm(
    partials,
    outs,
    signals,
    h,
    gain,
    done,
    failed,
    eps,
    index,
    max_polls,
    rank,
    rows,
    HIDDEN,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = rms(h + the sum over ranks of their partial sums) * gain, on every rank; h += the sum.

    Every rank owns rows / SIZE rows: it alone reads all partial sums of them, keeps h and takes the
    norm, and writes the result to all ranks. partials, outs, signals: int64 addresses of every
    rank's partial sums and results `[rows, HIDDEN]` and of its int32 signals: SIZE numbers of the
    reduction whose partial sums are complete at that rank, then how many rows have arrived here.
    """
    pdl_wait(PDL)
    pid = tl.program_id(0)
    epoch = tl.load(done) + index + 1
    here = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
    if pid == 0:
        for peer in tl.static_range(SIZE):
            there = tl.load(signals + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(there + rank, epoch, sem="release", scope="sys")
    peers = tl.arange(0, SIZE_P)
    at_least(here + peers, peers < SIZE, epoch, max_polls, failed)
    tl.debug_barrier()
    share = tl.cdiv(rows, SIZE)
    row = rank * share + pid
    cols = tl.arange(0, BLOCK)
    if row < tl.minimum(rank * share + share, rows):
        at = row.to(tl.int64) * HIDDEN + cols
        ok = cols < HIDDEN
        value = tl.load(h + at, mask=ok, other=0.0).to(tl.float32)
        for peer in tl.static_range(SIZE):
            part = tl.load(partials + peer).to(tl.pointer_type(h.dtype.element_ty))
            part = tl.multiple_of(part, 16)
            value += tl.load(part + at, mask=ok, other=0.0, cache_modifier=".cg").to(tl.float32)
        stored = value.to(h.dtype.element_ty)
        tl.store(h + at, stored, mask=ok)
        value = stored.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
        normed = (value * scale).to(h.dtype.element_ty).to(tl.float32)
        normed *= tl.load(gain + cols, mask=ok, other=0.0).to(tl.float32)
        for peer in tl.static_range(SIZE):
            out = tl.load(outs + peer).to(tl.pointer_type(h.dtype.element_ty))
            out = tl.multiple_of(out, 16)
            tl.store(out + at, normed.to(h.dtype.element_ty), mask=ok)
        tl.debug_barrier()  # every thread's part of the row is on its way before it is counted
        for peer in tl.static_range(SIZE):
            there = tl.load(signals + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_add(there + SIZE, 1, sem="release", scope="sys")
    if pid == tl.num_programs(0) - 1:
        one = tl.arange(0, 1)
        at_least(here + SIZE + one, one == 0, rows, max_polls, failed)
        tl.debug_barrier()
        tl.store(here + SIZE, 0)
