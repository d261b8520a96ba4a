# mypy: ignore-errors
"""Sampling on the device: noise, filters, masks of engine.kernels.sampling, without a sort."""

import triton
import triton.language as tl


@triton.jit
def mix32(x):
    """First half of MurmurHash3's 32-bit finaliser (the key, if any, is xored in after it)."""
    x ^= (x >> 16) & 0xFFFF
    return x * -2048144789


@triton.jit
def mix32_end(x):
    """Second half of the finaliser."""
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def gumbel(tokens, key0, key1):
    """Standard Gumbel noise of int32 token ids; logarithms in float64, as good as libm's."""
    spread = mix32_end(mix32(tokens * -1640531535))
    bits = (mix32_end(mix32(spread ^ key0) ^ key1) >> 9) & 0x7FFFFF
    uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
    inner = -tl.log(uniform.to(tl.float64)).to(tl.float32)
    return -tl.log(inner.to(tl.float64)).to(tl.float32)


@triton.jit
def ordered(x):
    """int32 that compares as the float32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def scaled_tile(row, at, V, temperature):
    """A tile of logits / temperature, -inf past the end."""
    value = tl.load(row + at, mask=at < V, other=-float("inf")).to(tl.float32)
    return tl.div_rn(value, tl.zeros_like(value) + temperature)


@triton.jit
def count_from(row, V, temperature, key, BLOCK: tl.constexpr):
    """How many scaled logits are at least `key` in the order of `ordered`."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (ordered(scaled_tile(row, at, V, temperature)) >= key) & (at < V)
        total += inside.to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def mass_over(row, V, temperature, key, peak, BLOCK: tl.constexpr):
    """Sum of exp(scaled logit - peak) over logits greater than `key`, in float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = scaled_tile(row, at, V, temperature)
        over = (ordered(value) > key) & (at < V)
        total += tl.where(over, tl.exp(value - peak), 0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def unordered(key):
    """The float32 of an `ordered` key."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def sampling_floor(
    logits, stride, temperatures, top_ks, top_ps, min_ps, floors, V, BLOCK: tl.constexpr
):
    """The lowest scaled logit that top-k, then top-p, then min-p leave in each row.

    Thresholds are found by bisection over the ordered bits of float32: 32 passes over a row that
    stays in the cache, instead of a sort. Equal logits are kept or dropped together.
    """
    index = tl.program_id(0)
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)
    row = logits + index.to(tl.int64) * stride
    limited = (top_k > 0) & (top_k < V)
    open_p = top_p >= 1.0
    floor = temperature * 0.0 - float("inf")
    if (temperature > 0.0) & (limited | (top_p < 1.0) | (min_p > 0.0)):
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in tl.range(0, V, BLOCK):
            best = tl.maximum(best, scaled_tile(row, start + tl.arange(0, BLOCK), V, temperature))
        peak = tl.max(best, axis=0)
        k_key = tl.full([], -2147483648, tl.int64)
        if limited:
            high = tl.full([], 2147483647, tl.int64)
            for _ in tl.range(0, 32):
                middle = k_key + (high - k_key + 1) // 2
                enough = count_from(row, V, temperature, middle.to(tl.int32), BLOCK) >= top_k
                k_key = tl.where(enough, middle, k_key)
                high = tl.where(enough, high, middle - 1)
        key = k_key
        if not open_p:
            total = mass_over(row, V, temperature, k_key.to(tl.int32), peak, BLOCK)
            if limited:
                above = count_from(row, V, temperature, (k_key + 1).to(tl.int32), BLOCK)
                edge = tl.exp(unordered(k_key.to(tl.int32)) - peak).to(tl.float64)
                total += (top_k - above).to(tl.float64) * edge
            wanted = top_p.to(tl.float64) * total
            low = tl.full([], -2147483648, tl.int64)
            high = tl.full([], 2147483647, tl.int64)
            for _ in tl.range(0, 32):
                middle = (low + high) >> 1
                within = mass_over(row, V, temperature, middle.to(tl.int32), peak, BLOCK) < wanted
                high = tl.where(within, middle, high)
                low = tl.where(within, low, middle + 1)
            # Never above the highest: a top_p that is 0 in float32 still leaves that one.
            key = tl.maximum(key, tl.minimum(low, ordered(peak).to(tl.int64)))
        if limited | (top_p < 1.0):
            floor = unordered(key.to(tl.int32))
        if min_p > 0.0:
            floor = tl.maximum(floor, peak + tl.log(min_p.to(tl.float64)).to(tl.float32))
    tl.store(floors + index, floor)


# Ranks keep their best values behind as many ids: how many rows there are moves them.
@triton.jit(do_not_specialize_on_alignment=["values"])
def sample_rows(
    logits,
    stride,
    temperatures,
    keys,
    floors,
    best_values,
    best_ids,
    counters,
    tokens,
    values,
    V,
    first_id,
    CHUNKS: tl.constexpr,
    CHUNKS_P: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """tokens[r] = argmax(logits[r] / temperature + noise) over what the filter leaves; its value.

    The logits are those of ids first_id .. first_id + V.

    Temperature 0 takes the plain argmax. Ties go to the lowest id. keys: `[rows, 2]` int32. The
    last chunk of a row to finish picks among the chunks' best. A row with NaN or +inf gives -1.
    """
    index = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperatures + index)
    row = logits + index.to(tl.int64) * stride
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    if temperature > 0.0:
        value = scaled_tile(row, at, V, temperature)
        noise = gumbel(first_id + at, tl.load(keys + index * 2), tl.load(keys + index * 2 + 1))
        keep = at < V
        if FILTERED:
            keep = keep & (value >= tl.load(floors + index))
        value = tl.where(keep, value + noise, -float("inf"))
    else:
        value = tl.load(row + at, mask=at < V, other=-float("inf")).to(tl.float32)
    plain = tl.load(row + at, mask=at < V, other=0.0).to(tl.float32)
    damaged = tl.max(((plain != plain) | (plain == float("inf"))).to(tl.int32), axis=0)
    # NaN compares with nothing: the winner could be an id past the vocabulary.
    value = tl.where(value == value, value, -float("inf"))
    best, winner = tl.max(value, axis=0, return_indices=True)
    slot = index * CHUNKS + chunk
    tl.store(best_values + slot, tl.where(damaged > 0, float("inf"), best))
    tl.store(best_ids + slot, tl.where(damaged > 0, -1, first_id + chunk * BLOCK + winner))
    tl.debug_barrier()
    finished = tl.atomic_add(counters + index, 1, sem="acq_rel", scope="gpu")
    if finished == CHUNKS - 1:
        chunks = tl.arange(0, CHUNKS_P)
        candidates = tl.load(
            best_values + index * CHUNKS + chunks,
            mask=chunks < CHUNKS,
            other=-float("inf"),
            cache_modifier=".cg",
        )
        best, first = tl.max(candidates, axis=0, return_indices=True)
        tl.store(values + index, best)
        tl.store(tokens + index, tl.load(best_ids + index * CHUNKS + first, cache_modifier=".cg"))
        tl.store(counters + index, 0)


@triton.jit(do_not_specialize=["ROWS"])
def pick_rank(gathered, tokens, ROWS, RANKS: tl.constexpr, RANKS_P: tl.constexpr):
    """tokens[r] = the id of the best of all ranks' candidates, the lowest rank's on a tie.

    gathered: int32 `[RANKS, 2, ROWS]`: ids, then the bits of their float32 values.
    """
    row = tl.program_id(0)
    ranks = tl.arange(0, RANKS_P)
    at = gathered + ranks * 2 * ROWS + row
    bits = tl.load(at + ROWS, mask=ranks < RANKS, other=0)
    value = tl.where(ranks < RANKS, bits.to(tl.float32, bitcast=True), -float("inf"))
    _, best = tl.max(value, axis=0, return_indices=True)
    tl.store(tokens + row, tl.load(gathered + best * 2 * ROWS + row))


@triton.jit
def mask_rows(logits, stride, rows, words, W, V, first_id, BLOCK: tl.constexpr):
    """logits[rows[m], at] = -inf where bit (first_id + at) of words[m] is 0.

    logits: any float `[.., V]`, the ids from first_id on; words: int32 `[masks, W]`.
    """
    index = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = first_id + at
    word = tl.load(words + index * W + (token >> 5), mask=at < V, other=-1)
    row = logits + tl.load(rows + index) * stride
    tl.store(row + at, -float("inf"), mask=((word >> (token & 31)) & 1) == 0)
