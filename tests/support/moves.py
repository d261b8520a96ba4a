"""Moves of whole blocks over a link between GPU pools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kv_transfer.backends.base import BlockMove, PoolAccess
from kv_transfer.config import ChecksumKind
from protocol.kv_layout import Cells


def make_move(
    blocks: Iterable[int], *, block_size: int, num_layers: int, num_heads: int, **changes: Any
) -> BlockMove:
    """All layers and heads of some blocks, without a checksum, or as `changes` say."""
    blocks = tuple(blocks)
    fields: dict[str, Any] = {
        "cells": Cells(blocks=blocks, size=block_size, count=len(blocks)),
        "first_layer": 0,
        "num_layers": num_layers,
        "first_head": 0,
        "num_heads": num_heads,
        "access": PoolAccess(),
        "checksum": ChecksumKind.NONE,
    }
    return BlockMove(**fields | changes)
