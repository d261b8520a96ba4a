"""How the contexts of decode rows are cut so that programs of about equal length fill the card."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Tables that the host plans for kernels.
Ints = np.ndarray[Any, np.dtype[np.int32]]

#: Programs that run at once on a Hopper card: four on each of 132 multiprocessors.
WAVE = 528
#: The most splits that the last of them merges: each two wait for memory once more.
MERGED_WITHIN = 8
#: The same of a long context that is cut by itself, and the least tiles of each such split: a tile
#: takes a program some 1.5 us (H200), so that merging more of them pays.
MERGE_ROOM, _LONG_SPLIT = 32, 8


def cuts_by_length(batch: int, kv_heads: int) -> bool:
    """Whether a batch has so many programs that each context is cut by itself: of fewer sequences
    each has many splits, which a second kernel merges."""
    return WAVE // (batch * kv_heads) <= MERGED_WITHIN


def max_splits(batch: int, kv_heads: int) -> int:
    """The most splits that a batch of decode rows alone has where each context is cut by itself."""
    wave = max(1, WAVE // kv_heads)
    return max(batch, wave) + wave // 2


def plan_splits(tiles: Ints, kv_heads: int, room: int, *, mixed: bool = False) -> Ints:
    """Cut contexts of so many tiles each into splits of about equal length, enough to fill the card
    and at most `room`, which is at least the number of contexts; one for a context without tiles.
    mixed: beside chunks, which leave multiprocessors one by one, half as many more are better.

    Gives int32 `[1 + n]`: n, then for each split its row, its number in the row << 16 and the row's
    splits << 24. The splits of a row stand together, rows with longer ones come first: however long
    one context is, no program has much more to read than others (the balance of FlashInfer, Ye et
    al., 2025, without its queue of work).
    """
    limits = np.maximum(MERGED_WITHIN, np.minimum(MERGE_ROOM, tiles // _LONG_SPLIT))
    wave, all_tiles = 3 * WAVE // 2 if mixed else WAVE, float(tiles.sum())
    counts = _counts(tiles, max(1.0, all_tiles * kv_heads / wave), limits)
    if counts.sum() > room:  # the nearest whole number of x, or 1, is at most 1 + x
        counts = _counts(tiles, all_tiles / max(1, room - len(tiles)), limits)
    total = int(counts.sum())
    order = np.argsort(-(tiles / counts), kind="stable").astype(np.int32)
    counts = counts[order]
    table = np.empty(1 + total, np.int32)
    table[0] = total
    number = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    table[1:] = np.repeat(order + (counts << 24), counts) + (number << 16)
    return table


def _counts(tiles: Ints, fair: float, limits: Ints) -> Ints:
    """Splits of about `fair` tiles, at most so many of each context."""
    return np.clip(np.rint(tiles / fair), 1, limits).astype(np.int32)
