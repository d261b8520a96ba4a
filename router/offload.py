"""Answers with thousands of log-probabilities or tokens: written in a thread, piece by piece, so
that other streams go on meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")

#: Tokens with log-probabilities that are written at once: a few milliseconds' work.
_FEW = 256
#: Items of a long array that are encoded by one call, which keeps every other thread waiting.
_PIECE = 64

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


async def off_loop(work: Callable[[], R], *, size: int) -> R:
    """`work()`, in a thread when it is about more than a few tokens."""
    return work() if size <= _FEW else await asyncio.to_thread(work)


def encode_in_pieces(value: Any) -> str:
    """What `encode` gives, but a long array is encoded piece by piece."""
    if isinstance(value, dict):
        fields = (f"{encode(name)}:{encode_in_pieces(item)}" for name, item in value.items())
        return "{" + ",".join(fields) + "}"
    if not isinstance(value, list | tuple):
        return encode(value)
    if len(value) <= _FEW:
        return "[" + ",".join(map(encode_in_pieces, value)) + "]"
    starts = range(0, len(value), _PIECE)
    return "[" + ",".join(encode(value[at : at + _PIECE])[1:-1] for at in starts) + "]"
