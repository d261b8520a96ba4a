"""Which heads of which source rank go to which destination rank, and in how large parts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import gcd

from protocol.errors import HandoffFailed
from protocol.kv_layout import DTYPE_BYTES, KVFingerprint, KVLayout, dtype_between

HeadRange = tuple[int, int]
_GROUP_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSlice:
    """Heads `heads` (half-open, counted over the model) go from one rank to another.

    `source_heads` and `dest_heads` are the same heads counted within each rank.
    """

    source_rank: int
    dest_rank: int
    heads: HeadRange
    source_heads: HeadRange
    dest_heads: HeadRange

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]


def check_fingerprint(mine: KVFingerprint, theirs: KVFingerprint) -> None:
    """Raise HandoffFailed naming the first field in which the two differ."""
    field = mine.differing_field(theirs)
    if field is not None:
        raise HandoffFailed(
            f"KV of the two workers does not fit: {field} is {getattr(mine, field)!r} here, "
            f"{getattr(theirs, field)!r} there",
            param=field,
        )


@lru_cache
def check_layout(mine: KVLayout, theirs: KVLayout) -> None:
    """Raise HandoffFailed naming the first field in which two layouts must agree and do not."""
    for field in ("num_layers", "num_kv_heads", "head_dim", "groups", "dtype"):
        if getattr(mine, field) != getattr(theirs, field):
            if field == "dtype" and dtype_between(mine.dtype, theirs.dtype) is not None:
                continue
            raise HandoffFailed(
                f"KV layouts do not fit: {field} is {getattr(mine, field)!r} here, "
                f"{getattr(theirs, field)!r} there",
                param=field,
            )
    for layout in (mine, theirs):
        if layout.block_size < 1:
            text = f"a block cannot have {layout.block_size} tokens"
            raise HandoffFailed(text, param="block_size")
        _check_ranks(layout.rank_heads, layout.num_kv_heads)


def _check_ranks(rank_heads: tuple[HeadRange, ...], num_heads: int) -> None:
    held = set[int]()
    for rank, (first, last) in enumerate(rank_heads):
        if not 0 <= first < last <= num_heads:
            raise HandoffFailed(
                f"rank {rank} holds heads [{first}, {last}) of {num_heads}", param="rank_heads"
            )
        held.update(range(first, last))
    if len(held) != num_heads:
        missing = sorted(set(range(num_heads)) - held)
        raise HandoffFailed(f"no rank holds heads {missing}", param="rank_heads")


@cache
def reshard(source: tuple[HeadRange, ...], dest: tuple[HeadRange, ...]) -> tuple[HeadSlice, ...]:
    """The slices that fill every destination rank, each of its heads exactly once.

    A destination that shares a head with others gets a copy of its own; of several sources that
    hold a head only one sends it to a given destination. Each rank's heads are covered left to
    right, always by the source that reaches furthest, which gives the fewest messages (greedy
    interval cover); ties go to different replicas for different destinations, so that replicas
    share the work.
    """
    slices = []
    for dest_rank, (first, last) in enumerate(dest):
        position = first
        while position < last:
            source_rank = _furthest(source, position, last, dest_rank)
            end = min(source[source_rank][1], last)
            offset = source[source_rank][0]
            slices.append(
                HeadSlice(
                    source_rank=source_rank,
                    dest_rank=dest_rank,
                    heads=(position, end),
                    source_heads=(position - offset, end - offset),
                    dest_heads=(position - first, end - first),
                )
            )
            position = end
    return tuple(slices)


def _furthest(source: tuple[HeadRange, ...], head: int, limit: int, dest_rank: int) -> int:
    reach = {rank: min(b, limit) for rank, (a, b) in enumerate(source) if a <= head < b}
    if not reach:
        raise HandoffFailed(f"no source rank holds head {head}", param="rank_heads")
    best = [rank for rank, end in reach.items() if end == max(reach.values())]
    return best[dest_rank % len(best)]


def layer_groups(num_layers: int, layer_bytes: int) -> list[int]:
    """How many layers move together while a step still computes later ones: half of the rest each
    time, so that little is left to move after the last layer; groups of 16 MiB or more, at which a
    copy comes near the link's rate."""
    min_layers = max(1, -(-_GROUP_BYTES // layer_bytes))
    groups = []
    left = num_layers
    while left >= 2 * min_layers:
        groups.append(left - left // 2)
        left //= 2
    return [*groups, left]


def cell_size(mine: int, theirs: int) -> int:
    """Tokens of a cell between workers of these block sizes: the largest unit that never crosses
    a block boundary of either."""
    return gcd(mine, theirs)


def travelling_dtype(mine: KVLayout, theirs: KVLayout) -> str:
    """The type of KV on its way between two pools that passed `check_layout`."""
    dtype = dtype_between(mine.dtype, theirs.dtype)
    assert dtype is not None
    return dtype


def kv_bytes(
    layout: KVLayout, *, num_tokens: int, num_layers: int, num_heads: int, dtype: str = ""
) -> int:
    """Bytes of the keys and values of `num_tokens`, in their own type or `dtype`."""
    per_token = 2 * layout.head_dim * DTYPE_BYTES[dtype or layout.dtype]
    return num_tokens * num_layers * num_heads * per_token


def cells_per_piece(layout: KVLayout, size: int, max_bytes: int, dtype: str = "") -> int:
    """How many cells of `size` tokens, with all layers and heads, fit one piece; at least 1."""
    layers, heads = layout.num_layers, layout.num_kv_heads
    cell = kv_bytes(layout, num_tokens=size, num_layers=layers, num_heads=heads, dtype=dtype)
    return max(1, max_bytes // cell)
