"""Event streams to the routers: one batch per router and step, heartbeats in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from protocol.messages import (
    EventBatch,
    FailEvent,
    PromptEvent,
    ScoreEvent,
    SpanEvent,
    TokenEvent,
    WorkerLoad,
)
from protocol.prefix import CacheChange
from worker_runtime.cache_feed import CacheFeed


@dataclass(slots=True, kw_only=True)
class RouterEvents:
    """Events of one step for one router."""

    tokens: list[TokenEvent] = field(default_factory=list)
    scores: list[ScoreEvent] = field(default_factory=list)
    failures: list[FailEvent] = field(default_factory=list)
    spans: list[SpanEvent] = field(default_factory=list)
    prompts: list[PromptEvent] = field(default_factory=list)


class EventOutlet:
    """Fans step events out to subscribed routers. Lives on the event loop; not thread-safe.

    A stream that ends means that its router is gone: `on_gone(router_id)` lets the worker cancel
    the router's requests. A second stream with the same id replaces the first. Changes of `cache`
    travel with whatever is sent next.
    """

    def __init__(
        self,
        *,
        epoch: int,
        heartbeat_s: float,
        load: Callable[[], WorkerLoad],
        on_gone: Callable[[str], None],
    ) -> None:
        self._epoch = epoch
        self._heartbeat_s = heartbeat_s
        self._load = load
        self._on_gone = on_gone
        self._queues: dict[str, asyncio.Queue[RouterEvents | None]] = {}
        self._sequence = 0
        self.cache = CacheFeed()

    def knows(self, router_id: str) -> bool:
        """Whether events for this router can be delivered."""
        return router_id in self._queues

    def publish(self, events: dict[str, RouterEvents]) -> None:
        """Queue one batch for each router named; events of routers that left are dropped."""
        for router_id, step in events.items():
            queue = self._queues.get(router_id)
            if queue is not None:
                queue.put_nowait(step)

    async def stream(self, router_id: str) -> AsyncIterator[EventBatch]:
        """Batches for one router until it leaves, another stream replaces this, or close()."""
        queue: asyncio.Queue[RouterEvents | None] = asyncio.Queue()
        replaced = self._queues.get(router_id)
        self._queues[router_id] = queue
        self.cache.open(router_id)
        if replaced is not None:
            replaced.put_nowait(None)
        try:
            yield self._batch(RouterEvents(), self.cache.take(router_id))
            while True:
                try:
                    step = await asyncio.wait_for(queue.get(), self._heartbeat_s)
                except TimeoutError:
                    step = RouterEvents()
                if step is None:
                    return
                current = self._queues.get(router_id) is queue
                cache = self.cache.take(router_id) if current else None
                # Numbered here: a heartbeat may overtake what is queued.
                yield self._batch(step, cache)
        finally:
            if self._queues.get(router_id) is queue:
                del self._queues[router_id]
                self.cache.close(router_id)
                self._on_gone(router_id)

    def close(self) -> None:
        """End every stream after what is queued."""
        for queue in self._queues.values():
            queue.put_nowait(None)

    def _batch(self, step: RouterEvents, cache: CacheChange | None) -> EventBatch:
        self._sequence += 1
        return EventBatch(
            epoch=self._epoch,
            sequence=self._sequence,
            load=self._load(),
            tokens=tuple(step.tokens),
            scores=tuple(step.scores),
            failures=tuple(step.failures),
            spans=tuple(step.spans),
            prompts=tuple(step.prompts),
            cache=cache,
        )
