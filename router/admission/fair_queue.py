"""Whose request goes next when not all can: fair shares of tokens between callers. Pure.

Each flow (a caller and its service tier) has a virtual counter of the tokens it has had, divided by
its weight; the flow that is furthest behind goes next. A flow that comes back from idleness starts
level with the others, so that it can neither bank shares nor be made to pay for them. The
counters take in output tokens once they are known, so that short prompts with long answers pay too.
After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(https://arxiv.org/abs/2401.00588): work-conserving, and no flow can starve another.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class QueueEntry(Generic[T]):
    """One waiting item of `cost` tokens."""

    item: T
    flow: str
    cost: int
    gone: bool = False


@dataclass(slots=True)
class _Flow(Generic[T]):
    weight: float = 1.0
    had: float = 0.0  # tokens over weight
    tokens: int = 0  # waiting
    gone: int = 0  # entries of the heap that have left
    heap: list[tuple[int, int, QueueEntry[T]]] = field(default_factory=list)


class FairQueue(Generic[T]):
    """Items wait here by flow; within a flow lower `priority` goes first, then age."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        self._order = itertools.count()
        self._level = 0.0  # counter of the flow that went last
        self._num = 0

    def __len__(self) -> int:
        return self._num

    @property
    def tokens(self) -> int:
        """Tokens of everything that waits."""
        return sum(flow.tokens for flow in self._flows.values())

    def push(
        self, item: T, *, flow: str, weight: float, cost: int, priority: int = 0
    ) -> QueueEntry[T]:
        """Add an item; what it returns takes it out again."""
        entry = QueueEntry(item=item, flow=flow, cost=cost)
        state = self._flows.setdefault(flow, _Flow())
        state.had = self._start(state)
        state.weight = weight
        state.tokens += cost
        heapq.heappush(state.heap, (priority, next(self._order), entry))
        self._num += 1
        return entry

    def first(self) -> QueueEntry[T] | None:
        """The item that goes next."""
        flow = self._furthest_behind()
        return None if flow is None else flow.heap[0][2]

    def take(self) -> QueueEntry[T]:
        """Remove the item that goes next and charge its flow. There must be one."""
        flow = self._furthest_behind()
        assert flow is not None
        entry = flow.heap[0][2]
        flow.had += entry.cost / flow.weight
        self._level = flow.had
        self.remove(entry)
        return entry

    def remove(self, entry: QueueEntry[T]) -> None:
        """Take an item out uncharged. Idempotent."""
        if entry.gone:
            return
        entry.gone = True
        self._num -= 1
        flow = self._flows[entry.flow]
        flow.tokens -= entry.cost
        flow.gone += 1
        while flow.heap and flow.heap[0][2].gone:
            heapq.heappop(flow.heap)
            flow.gone -= 1
        if 2 * flow.gone > len(flow.heap):  # behind a first one that waits for long
            flow.heap = [item for item in flow.heap if not item[2].gone]
            heapq.heapify(flow.heap)
            flow.gone = 0

    def charge(self, flow: str, tokens: float, *, weight: float) -> None:
        """Count tokens that a flow, which may never have waited, has had besides what was waiting
        here."""
        self._flows.setdefault(flow, _Flow()).had += tokens / weight

    def ahead(self, flow: str, *, weight: float) -> int:
        """About how many tokens would go before an item that came now."""
        own = self._flows.get(flow) or _Flow()
        # The counter that `flow` will have reached when everything of its own has gone.
        reached = self._start(own) + own.tokens / weight
        total = float(own.tokens)
        for other in self._flows.values():
            if other is not own and other.heap:
                total += min(other.tokens, max(0.0, (reached - other.had) * other.weight))
        return int(total)

    def _start(self, flow: _Flow[T]) -> float:
        """A flow's counter when its next item comes: level with the others after idling."""
        if flow.heap:
            return flow.had
        active = [other.had for other in self._flows.values() if other.heap]
        return max(flow.had, min(active, default=self._level))

    def _furthest_behind(self) -> _Flow[T] | None:
        active = [flow for flow in self._flows.values() if flow.heap]
        return min(active, key=lambda flow: (flow.had, flow.heap[0][1]), default=None)
