"""Counts of one side's hand-offs, for metrics and for tests that look for leaks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """Totals since the start. `failures` counts by error code; `relinked` counts broken
    connections."""

    committed: int = 0
    released: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_pieces: int = 0
    relinked: int = 0
