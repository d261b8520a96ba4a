"""Prompts of token ids at every length that has ever been a boundary."""

from __future__ import annotations

import random


def random_ids(length: int, seed: int = 0, vocab: int = 128) -> list[int]:
    """The same for the same arguments; each is a new draw."""
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(vocab) for _ in range(length)]


def boundary_lengths(block: int, chunk: int) -> list[int]:
    """One token, block and chunk boundaries, several chunks and a rest."""
    return [1, block - 1, block, block + 1, chunk - 1, chunk, chunk + 1, 3 * chunk + 7]


def prompts(count: int, *, chunk: int, longest: int, vocab: int = 49_000) -> list[list[int]]:
    """Random ids: the boundary lengths and `longest` first, then from 1 up to it in steps that
    grow, shuffled."""
    rng = random.Random(17)
    lengths = [n for n in (*boundary_lengths(16, chunk), longest) if n <= longest]
    rest = count - len(lengths)
    spread = [int(longest ** ((i + 0.5) / rest) ** 1.5) for i in range(rest)]
    lengths += rng.sample(spread, len(spread))
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths[:count]]
