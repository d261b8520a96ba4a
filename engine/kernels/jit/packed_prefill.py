# mypy: ignore-errors
"""Causal attention of prompt chunks over their paged context, for Hopper (FlashAttention-3 order,
Shah et al., 2024), in Gluon.

The query heads of a KV head are rows of one tile of 64. One warp brings pages of keys and values
into rings of tiles by the copy engine; four warps multiply: the values of the tile before are
weighed while the softmax of this one runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

#: Names of triton 3.9, or of 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_tiles = gl.shared_memory_descriptor
_viewed = getattr(_tiles, "reinterpret", None) or getattr(_tiles, "_reinterpret")  # noqa: B009

#: Rows of a tile, and the warps that compute them.
ROWS = gl.constexpr(64)
WARPS = gl.constexpr(4)
#: Registers of the copying warp.
_COPY_REGISTERS = gl.constexpr(40)


@gluon.constexpr_function
def swizzled(rank):
    """Rows of 128 bytes in shared memory, as the matrix units read them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@gluon.constexpr_function
def page_box(page, dim):
    """What one copy brings: a page as groups of 8 tokens, halves of 64 dims, tokens, dims."""
    return [page // 8, dim // 64, 8, 64]


@gluon.constexpr_function
def _tile_layout(keys, dim, transposed):
    """A tile `[keys, dim]` of such pages, or its transpose."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    column, key = 64, 8
    while column < dim:
        bases.append([0, column])
        column *= 2
    while key < keys:
        bases.append([key, 0])
        key *= 2
    if transposed:
        bases = [[b, a] for a, b in bases]
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.constexpr_function
def _products(columns):
    """Sums of products `[ROWS, columns]` in registers."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS.value, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def _whole_rows(dim):
    """`[rows, dim]` in registers, 16 bytes of a row for each thread."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [WARPS.value, 1], [1, 0])


@gluon.jit
def _values(tiles, slot, KEYS: gl.constexpr, DIM: gl.constexpr):
    layout: gl.constexpr = _tile_layout(KEYS, DIM, False)
    return _viewed(tiles.index(slot), tiles.dtype, [KEYS, DIM], layout)


@gluon.jit
def _keys(tiles, slot, KEYS: gl.constexpr, DIM: gl.constexpr):
    layout: gl.constexpr = _tile_layout(KEYS, DIM, True)
    return _viewed(tiles.index(slot), tiles.dtype, [DIM, KEYS], layout)


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The place behind this one in a ring, and the phase of its barriers."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _blocks_from(table, page, last, PAGES: gl.constexpr):
    """Numbers of the blocks of PAGES pages from `page` on; for pages behind `last`, its block."""
    ids = (gl.load(table + gl.minimum(page, last)),)
    for i in gl.static_range(1, PAGES):
        ids = ids + (gl.load(table + gl.minimum(page + i, last)),)  # noqa: RUF005
    return ids


@gluon.jit
def _bring(
    pool, ids, plane, tile, barrier,
    PLANES: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Copy one plane (k or v of a KV head) of blocks `ids` into a tile."""
    PAGES: gl.constexpr = KEYS // PAGE
    mbarrier.expect(barrier, KEYS * DIM * 2)
    layout: gl.constexpr = swizzled(4)
    pages = _viewed(tile, tile.dtype, [PAGES, PAGE // 8, DIM // 64, 8, 64], layout)
    for i in gl.static_range(PAGES):
        group = (ids[i] * PLANES + plane) * (PAGE // 8)
        _copy(pool, [group, 0, 0, 0], barrier, pages.index(i))


@gluon.jit
def _tile_at(tiles, index, FIELDS: gl.constexpr):
    """Fields of a query tile: row of its first query, queries, position of the first, table, the
    context begin .. end, and scratch slot of the first part, number of this part, of parts."""
    at = tiles + index * FIELDS
    first, count, start = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    table, begin, end = gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)
    slot, part, parts = gl.load(at + 6), gl.load(at + 7), gl.load(at + 8)
    return first, count, start, table, begin, end, slot, part, parts


@gluon.jit
def _produce(
    pool, tiles, num_tiles, blocks, head, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr,
    FIELDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the rings with the context of this program's tiles."""
    PAGES: gl.constexpr = KEYS // PAGE
    PLANES: gl.constexpr = 2 * KV_HEADS
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # nothing has to become empty first
    for index in range(gl.program_id(1), num_tiles, gl.num_programs(1)):
        _, _, _, table, begin, end, _, _, _ = _tile_at(tiles, index, FIELDS)
        last = (end - 1) // PAGE
        page = begin // PAGE
        ids = _blocks_from(blocks + table, page, last, PAGES)
        for _ in range((end - begin + KEYS - 1) // KEYS):
            page += PAGES
            following = _blocks_from(blocks + table, page, last, PAGES)
            mbarrier.wait(k_empty.index(slot), phase)
            full = k_full.index(slot)
            _bring(pool, ids, head, k_tiles.index(slot), full, PLANES, PAGE, DIM, KEYS)
            mbarrier.wait(v_empty.index(slot), phase)
            full = v_full.index(slot)
            _bring(pool, ids, head + KV_HEADS, v_tiles.index(slot), full, PLANES, PAGE, DIM, KEYS)
            ids = following
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _cells(first, count, head, stride, GROUP: gl.constexpr, DIM: gl.constexpr):
    """Where the rows of a tile lie in a matrix of that stride, and which are there."""
    layout: gl.constexpr = _whole_rows(DIM)
    local = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    row = (first + local // GROUP).to(gl.int64)
    column = (head * GROUP + local % GROUP) * DIM
    inside = (local < count * GROUP)[:, None] & (dims < DIM)[None, :]
    return (row * stride + column)[:, None] + dims[None, :], inside


@gluon.jit
def _fold(
    score, peak, total, unit, at, limit, MASKED: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    """Softmax weights of a tile's products, the new peak and total, and what becomes of the sums
    before. limit: the last token that each row sees."""
    layout: gl.constexpr = _products(KEYS)
    if MASKED:
        token = at + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        score = gl.where(token[None, :] <= limit[:, None], score, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(score, axis=1) * unit)
    shrink = gl.exp2(peak - new_peak)
    weight = gl.exp2(score * unit - new_peak[:, None])
    return weight, new_peak, total * shrink + gl.sum(weight, axis=1), shrink


@gluon.jit
def _scores(query, k_tiles, k_full, slot, phase, KEYS: gl.constexpr, DIM: gl.constexpr):
    """Begin the products of the queries with a tile of keys."""
    empty = gl.zeros([ROWS, KEYS], gl.float32, _products(KEYS))
    mbarrier.wait(k_full.index(slot), phase)
    keys = _keys(k_tiles, slot, KEYS, DIM)
    return warpgroup_mma(query, keys, empty, use_acc=False, is_async=True)


@gluon.jit
def _fold_tiles(
    query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    weight, acc, peak, total, slot, phase, first, last, begin, unit, limit,
    MASKED: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles first .. last: weights of each, and the values of the tile before it, whose `weight` is
    given; slot, phase: its place in the rings."""
    sums: gl.constexpr = _products(DIM)
    for tile in range(first, last):
        before, before_phase = slot, phase
        slot, phase = _next(slot, phase, STAGES)
        raw = _scores(query, k_tiles, k_full, slot, phase, KEYS, DIM)
        mbarrier.wait(v_full.index(before), before_phase)
        values = _values(v_tiles, before, KEYS, DIM)
        moving = warpgroup_mma(weight, values, acc, is_async=True)
        raw = warpgroup_mma_wait(1, deps=[raw])
        mbarrier.arrive(k_empty.index(slot), count=1)
        at = begin + tile * KEYS
        fresh, peak, total, shrink = _fold(raw, peak, total, unit, at, limit, MASKED, KEYS)
        acc, weight = warpgroup_mma_wait(0, deps=[moving, weight])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
        weight = gl.convert_layout(fresh.to(query.dtype), gl.DotOperandLayout(0, sums, 2))
    return weight, acc, peak, total, slot, phase


@gluon.jit
def _clear_behind(values, used, KEYS: gl.constexpr, DIM: gl.constexpr):
    """Zero all values but the first `used`: the rest of a block may hold what is not finite."""
    layout: gl.constexpr = _whole_rows(DIM)
    token = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    held = values.load(layout)
    _barrier()
    values.store(gl.where((token < used)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    _barrier()


@gluon.jit
def _merged(
    partial, stats, base, parts, local, dims, used, KV_HEADS: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """The softmax-weighted sum of a tile's parts, always in the same order; its (acc, total)."""
    layout: gl.constexpr = _products(DIM)
    peak = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    for i in range(parts):
        row = base + i * (KV_HEADS * ROWS) + local
        peak = gl.maximum(peak, gl.load(stats + row * 2, cache_modifier=".cg"))
    acc = gl.zeros([ROWS, DIM], gl.float32, layout)
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for i in range(parts):
        row = base + i * (KV_HEADS * ROWS) + local
        weight = gl.exp2(gl.load(stats + row * 2, cache_modifier=".cg") - peak)
        total += gl.load(stats + row * 2 + 1, cache_modifier=".cg") * weight
        cells = partial + row.to(gl.int64)[:, None] * DIM + dims[None, :]
        acc += gl.load(cells, mask=used, other=0.0, cache_modifier=".cg") * weight[:, None]
    return acc, total


@gluon.jit
def _finish(
    acc, peak, total, smem, out, out_stride, partial, stats, counters,
    first, count, head, slot, part, parts,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Write the result; of a tile in parts, leave this part's sums in scratch, and the part that
    ends last merges all."""
    layout: gl.constexpr = _products(DIM)
    whole = count > 0
    if parts > 1:
        local = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        dims = gl.arange(0, DIM, gl.SliceLayout(0, layout))
        used = (local < count * GROUP)[:, None] & (dims < DIM)[None, :]
        base = (slot * KV_HEADS + head) * ROWS
        row = base + part * (KV_HEADS * ROWS) + local
        gl.store(partial + row.to(gl.int64)[:, None] * DIM + dims[None, :], acc, mask=used)
        gl.store(stats + row * 2, peak)
        gl.store(stats + row * 2 + 1, total)
        _barrier()
        counter = counters + slot * KV_HEADS + head
        done = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        whole = done == parts - 1
        if whole:
            acc, total = _merged(partial, stats, base, parts, local, dims, used, KV_HEADS, DIM)
            gl.store(counter, 0)
    if whole:
        # The queries are no longer needed: in their place the result becomes whole rows.
        _barrier()
        smem.store((acc / total[:, None]).to(smem.dtype))
        _barrier()
        at, inside = _cells(first, count, head, out_stride, GROUP, DIM)
        gl.store(out + at, smem.load(_whole_rows(DIM)), mask=inside)
    _barrier()


@gluon.jit
def _attend(
    q, q_stride, unit, first, count, start, begin, end, head,
    query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, slot, phase,
    KEYS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sums, peaks and totals of a tile. slot, phase: where the ring is, before and after."""
    scores: gl.constexpr = _products(KEYS)
    sums: gl.constexpr = _products(DIM)
    at, inside = _cells(first, count, head, q_stride, GROUP, DIM)
    query.store(gl.load(q + at, mask=inside, other=0.0))
    fence_async_shared()
    _barrier()
    local = gl.arange(0, ROWS, gl.SliceLayout(1, scores))
    limit = gl.minimum(start + local // GROUP, end - 1)
    tiles = (end - begin + KEYS - 1) // KEYS
    seen_by_all = gl.maximum(gl.minimum(start + 1, end) - begin, 0) // KEYS

    slot, phase = _next(slot, phase, STAGES)
    raw = _scores(query, k_tiles, k_full, slot, phase, KEYS, DIM)
    raw = warpgroup_mma_wait(0, deps=[raw])
    mbarrier.arrive(k_empty.index(slot), count=1)
    peak = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, scores))
    fresh, peak, total, _ = _fold(raw, peak, total, unit, begin, limit, True, KEYS)
    acc = gl.zeros([ROWS, DIM], gl.float32, sums)
    weight = gl.convert_layout(fresh.to(query.dtype), gl.DotOperandLayout(0, sums, 2))
    plain = gl.maximum(seen_by_all, 1)
    weight, acc, peak, total, slot, phase = _fold_tiles(
        query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, weight, acc, peak, total, slot,
        phase, 1, plain, begin, unit, limit, False, KEYS, DIM, STAGES,
    )  # fmt: skip
    weight, acc, peak, total, slot, phase = _fold_tiles(
        query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, weight, acc, peak, total, slot,
        phase, plain, tiles, begin, unit, limit, True, KEYS, DIM, STAGES,
    )  # fmt: skip
    mbarrier.wait(v_full.index(slot), phase)
    values = _values(v_tiles, slot, KEYS, DIM)
    used = end - begin - (tiles - 1) * KEYS
    if used < KEYS:
        _clear_behind(values, used, KEYS, DIM)
    moving = warpgroup_mma(weight, values, acc, is_async=True)
    acc, weight = warpgroup_mma_wait(0, deps=[moving, weight])
    mbarrier.arrive(v_empty.index(slot), count=1)
    peak = gl.convert_layout(peak, gl.SliceLayout(1, sums))
    total = gl.convert_layout(total, gl.SliceLayout(1, sums))
    return acc, peak, total, slot, phase


@gluon.jit
def _consume(
    q, q_stride, out, out_stride, partial, stats, counters, unit, tiles, num_tiles, head,
    query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    KEYS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    FIELDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of this program's tiles."""
    slot = gl.to_tensor(STAGES - 1)
    phase = gl.to_tensor(1)
    for index in range(gl.program_id(1), num_tiles, gl.num_programs(1)):
        first, count, start, _, begin, end, part_slot, part, parts = _tile_at(tiles, index, FIELDS)
        acc, peak, total, slot, phase = _attend(
            q, q_stride, unit, first, count, start, begin, end, head,
            query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, slot, phase,
            KEYS, GROUP, DIM, STAGES,
        )  # fmt: skip
        _finish(
            acc, peak, total, query, out, out_stride, partial, stats, counters, first, count, head,
            part_slot, part, parts, KV_HEADS, GROUP, DIM,
        )  # fmt: skip


@gluon.jit
def packed_prefill(
    q, q_stride, pool, tiles, blocks, out, out_stride, partial, stats, counters, counts, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, FIELDS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attention of each n-th tile for one KV head, n programs being launched for it. q is rotated
    and the new KV is in the pool already; pool is a descriptor of boxes `page_box`. Tiles: as of
    `paged_prefill` (engine.kernels.jit), of at most ROWS / (HEADS / KV_HEADS) queries, counts[0] of
    them; `begin` is a multiple of PAGE, before `end`, and not behind the first query."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    head = gl.program_id(0)
    num_tiles = gl.load(counts)
    unit = scale * 1.4426950408889634

    kind: gl.constexpr = q.dtype.element_ty
    ring: gl.constexpr = mbarrier.MBarrierLayout()
    query = gl.allocate_shared_memory(kind, [ROWS, DIM], swizzled(2))
    shape: gl.constexpr = [STAGES, KEYS // PAGE * (PAGE // 8), DIM // 64, 8, 64]
    k_tiles = gl.allocate_shared_memory(kind, shape, swizzled(4))
    v_tiles = gl.allocate_shared_memory(kind, shape, swizzled(4))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ring)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ring)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ring)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ring)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    fence_async_shared()
    if PDL:  # the kernel before writes queries, keys and values
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    _barrier()
    gl.warp_specialize(
        [
            (_consume, (
                q, q_stride, out, out_stride, partial, stats, counters, unit, tiles, num_tiles,
                head, query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                KEYS, KV_HEADS, GROUP, DIM, FIELDS, STAGES,
            )),
            (_produce, (
                pool, tiles, num_tiles, blocks, head, k_tiles, v_tiles, k_full, k_empty, v_full,
                v_empty, KV_HEADS, PAGE, DIM, KEYS, FIELDS, STAGES,
            )),
        ],
        [1],
        [_COPY_REGISTERS],
    )  # fmt: skip
