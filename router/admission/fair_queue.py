"""Whose request goes next when not all can: fair shares of tokens between callers. Pure.

Each flow (a caller and its service tier) has a virtual counter of the tokens it has had, divided by
its weight; the flow that is furthest behind goes next. A flow that comes back from idleness starts
level with the others, so that it can neither bank shares nor be made to pay for them. The
counters take in output tokens once they are known, so that short prompts with long answers pay too.
After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(https://arxiv.org/abs/2401.00588): work-conserving, and no flow can starve another.

Entries have a size. One that may not go yet holds back its own size only, so that a large request
never blocks small ones.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from protocol.messages import size_class

T = TypeVar("T")
#: Size classes of the cost and of the tokens to store.
Size = tuple[int, int]


@dataclass(slots=True, kw_only=True, eq=False)
class QueueEntry(Generic[T]):
    """One waiting item: `cost` tokens to compute, `num_tokens` to store."""

    item: T
    flow: str
    cost: int
    num_tokens: int
    size: Size
    removed: bool = False


_Heap = list[tuple[int, int, QueueEntry[T]]]  # by priority and age


@dataclass(slots=True)
class _Flow(Generic[T]):
    weight: float = 1.0
    served: float = 0.0  # tokens over weight
    tokens: dict[int, int] = field(default_factory=dict)  # waiting, by size class of the cost
    stored: dict[int, int] = field(default_factory=dict)  # what they need memory for
    removed: dict[Size, int] = field(default_factory=dict)  # entries still in the heap
    heaps: dict[Size, _Heap[T]] = field(default_factory=dict)

    def up_to(self, size: int) -> tuple[int, int]:
        """Tokens to compute and to store, of items of a size class and below."""
        sizes = [other for other in self.tokens if other <= size]
        return sum(self.tokens[each] for each in sizes), sum(self.stored[each] for each in sizes)

    def add(self, entry: QueueEntry[T], sign: int) -> None:
        size = entry.size[0]
        self.tokens[size] = self.tokens.get(size, 0) + sign * entry.cost
        self.stored[size] = self.stored.get(size, 0) + sign * entry.num_tokens


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
        return sum(sum(flow.tokens.values()) for flow in self._flows.values())

    def push(
        self,
        item: T,
        *,
        flow: str,
        weight: float,
        cost: int,
        num_tokens: int = 0,
        priority: int = 0,
    ) -> QueueEntry[T]:
        """Add an item that costs prefill `cost` tokens and needs memory for `num_tokens`. Returns
        the entry, for `take` and `remove`."""
        size = size_class(cost), size_class(num_tokens)
        entry = QueueEntry(item=item, flow=flow, cost=cost, num_tokens=num_tokens, size=size)
        state = self._flows.setdefault(flow, _Flow())
        state.served = self._start(state)
        state.weight = weight
        state.add(entry, 1)
        heap = state.heaps.setdefault(entry.size, [])
        heapq.heappush(heap, (priority, next(self._order), entry))
        self._num += 1
        return entry

    def next(self, may_go: Callable[[T], bool] = lambda _item: True) -> QueueEntry[T] | None:
        """The entry that goes next, of those that may. Asks about one entry of a size."""
        blocked: set[Size] = set()
        # Each flow with the first entries of its sizes, the next one last.
        flows: list[tuple[float, int, _Heap[T]]] = []
        for flow in self._flows.values():
            if flow.heaps:
                heads = sorted((heap[0] for heap in flow.heaps.values()), reverse=True)
                flows.append((flow.served, heads[-1][1], heads))
        heapq.heapify(flows)
        while flows:
            served, _, heads = flows[0]
            entry = heads.pop()[2]
            if entry.size not in blocked:
                if may_go(entry.item):
                    return entry
                blocked.add(entry.size)
            if heads:
                heapq.heapreplace(flows, (served, heads[-1][1], heads))
            else:
                heapq.heappop(flows)
        return None

    def take(self, entry: QueueEntry[T]) -> None:
        """Remove an entry and charge its flow."""
        flow = self._flows[entry.flow]
        flow.served += entry.cost / flow.weight
        self._level = flow.served
        self.remove(entry)

    def remove(self, entry: QueueEntry[T]) -> None:
        """Remove an entry uncharged. Idempotent."""
        if entry.removed:
            return
        entry.removed = True
        self._num -= 1
        flow, size = self._flows[entry.flow], entry.size
        flow.add(entry, -1)
        removed, heap = flow.removed.get(size, 0) + 1, flow.heaps[size]
        while heap and heap[0][2].removed:
            heapq.heappop(heap)
            removed -= 1
        if 2 * removed > len(heap):  # behind a first one that waits for long
            heap[:] = [item for item in heap if not item[2].removed]
            heapq.heapify(heap)
            removed = 0
        flow.removed[size] = removed
        if not heap:
            del flow.heaps[size]

    def charge(self, flow: str, tokens: float, *, weight: float) -> None:
        """Count tokens that a flow, which may never have waited, was served outside the queue."""
        self._flows.setdefault(flow, _Flow()).served += tokens / weight

    def ahead(self, flow: str, *, weight: float, cost: int) -> tuple[int, int]:
        """About how many tokens would be computed, and stored, before an item of `cost` tokens that
        came now: those of smaller ones, or about as large."""
        size = size_class(cost)
        own = self._flows.get(flow) or _Flow()
        own_tokens, stored = map(float, own.up_to(size))
        # The counter that `flow` will have reached when everything of its own has gone.
        reached = self._start(own) + own_tokens / weight
        total = own_tokens
        for other in self._flows.values():
            if other is not own and other.heaps:
                share = max(0.0, (reached - other.served) * other.weight)
                tokens, others_stored = other.up_to(size)
                if tokens:
                    total += min(tokens, share)
                    stored += min(1.0, share / tokens) * others_stored
        return int(total), int(stored)

    def _start(self, flow: _Flow[T]) -> float:
        """A flow's counter when its next item comes: level with the others after idling."""
        if flow.heaps:
            return flow.served
        active = [other.served for other in self._flows.values() if other.heaps]
        return max(flow.served, min(active, default=self._level))
