"""Writing answers with thousands of tokens in a thread and in slices, so that other streams go on
meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")

#: Tokens with log-probabilities that the event loop writes itself: a few milliseconds.
_MAX_ON_LOOP = 256
#: Items of a long array encoded by one call, which holds the interpreter's lock.
_SLICE = 64

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


async def off_loop(work: Callable[[], R], *, size: int) -> R:
    """`work()`, in a thread when it handles more than a few tokens."""
    return work() if size <= _MAX_ON_LOOP else await asyncio.to_thread(work)


def encode_in_pieces(value: Any) -> str:
    """As `encode`, with long arrays encoded slice by slice."""
    if isinstance(value, dict):
        fields = (f"{encode(name)}:{encode_in_pieces(item)}" for name, item in value.items())
        return "{" + ",".join(fields) + "}"
    if not isinstance(value, list | tuple):
        return encode(value)
    if len(value) <= _MAX_ON_LOOP:
        return "[" + ",".join(map(encode_in_pieces, value)) + "]"
    starts = range(0, len(value), _SLICE)
    return "[" + ",".join(encode(value[at : at + _SLICE])[1:-1] for at in starts) + "]"
