"""Counts of one side's hand-offs, for metrics and for tests that look for leaks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from observability import metrics
from observability.metrics import counter_key


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

    def counters(self) -> dict[str, int]:
        """The totals, keyed as observability.metrics names them."""
        causes = {
            counter_key(metrics.HANDOFF_FAILURES, cause=cause): count
            for cause, count in self.failures.items()
        }
        return {
            counter_key(metrics.HANDOFFS, outcome="committed"): self.committed,
            counter_key(metrics.HANDOFFS, outcome="released"): self.released,
            counter_key(metrics.HANDOFF_BYTES): self.num_bytes,
            counter_key(metrics.HANDOFF_PIECES): self.num_pieces,
            counter_key(metrics.HANDOFF_RELINKS): self.relinked,
            **causes,
        }
