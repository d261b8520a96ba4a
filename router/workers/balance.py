"""Which decode workers give sequences to one that has just begun to decode. Pure.

New requests go where few sequences are, which evens out workers that have been there for long. One
that joins, or takes the role, beside full ones would stay nearly idle for as long as an output
takes. Nothing else moves sequences between workers that want them: a move costs their clients a
gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.workers.policy import WorkerView

#: A newcomer is helped for so long.
_SETTLE_S = 15.0
#: A worker gives no more than so many sequences at a time; the next look sees what has come of it.
_AT_ONCE = 8
#: Fewer sequences more than the newcomer has are not worth a gap.
_LEAST_DIFFERENCE = 8


@dataclass(slots=True)
class Newcomers:
    """The workers that began to decode a short time ago, by id; the first that are seen are not
    new."""

    _known: set[str] | None = None
    _since: dict[str, float] = field(default_factory=dict)

    def see(self, decodes: set[str], now: float) -> set[str]:
        """The newcomers among the workers that decode at `now`."""
        known = self._known or decodes
        self._known = set(decodes) or self._known
        self._since = {
            name: at
            for name in decodes
            if now - (at := self._since.get(name, now if name not in known else -math.inf))
            <= _SETTLE_S
        }
        return set(self._since)


def surplus(views: Sequence[WorkerView], newcomers: set[str]) -> Mapping[str, int]:
    """How many sequences each worker, by id, should give up for the newcomer that has fewest: half
    of what it has more, if that is twice as many at least."""
    if not newcomers:
        return {}
    fewest = min(v.num_sequences for v in views if v.ref.worker_id in newcomers)
    givers = {
        view.ref.worker_id: view.num_sequences - fewest
        for view in views
        if view.num_sequences >= max(2 * fewest, fewest + _LEAST_DIFFERENCE)
    }
    share = max(1, len(givers))
    return {name: min(_AT_ONCE, max(1, more // (share + 1))) for name, more in givers.items()}
