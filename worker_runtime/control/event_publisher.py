"""Event streams to the routers: one batch per router and step, heartbeats in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Mapping
from itertools import islice

from observability.logging import get_logger
from protocol.ids import Role
from protocol.kv_layout import HINT_BYTES, CacheChange
from protocol.messages import EventBatch, WorkerLoad
from protocol.states import WorkerState
from worker_runtime.scheduling.messages import RouterEvents

log = get_logger(__name__)

#: Hints in one message: half a MiB, of the four that a message may have.
_MAX_HINTS = 1 << 16
#: Changes that wait for a router to be told something.
_MAX_PENDING = 1 << 12


class CacheFeed:
    """Net changes of the prefix cache that each router has not received yet.

    A block that came and went between two messages is not reported, so a router that does not read
    costs no more than the blocks of both sides. Knows hints only: two digests with the same hint
    count as one.
    """

    def __init__(self) -> None:
        self._pending: dict[bytes, bool] = {}  # not in what follows yet
        self._held: dict[bytes, None] = {}  # in order of arrival
        self._unsent: dict[str, dict[bytes, bool]] = {}
        self._new: set[str] = set()

    def change(self, changes: Mapping[bytes, bool]) -> None:
        """Digests were added (True) or removed (False). Hand-offs of the same step go first."""
        self._pending.update(changes)
        if len(self._pending) > _MAX_PENDING:
            self._count()

    def _count(self) -> None:
        pending, self._pending = self._pending, {}
        for digest, here in pending.items():
            hint = digest[:HINT_BYTES]
            if (hint in self._held) is here:
                continue
            if here:
                self._held[hint] = None
            else:
                del self._held[hint]
            for unsent in self._unsent.values():
                if unsent.pop(hint, None) is None:  # else the router's state is right again
                    unsent[hint] = here

    def open(self, router_id: str) -> None:
        self._count()
        self._unsent[router_id] = dict.fromkeys(self._held, True)
        self._new.add(router_id)

    def close(self, router_id: str) -> None:
        self._unsent.pop(router_id, None)
        self._new.discard(router_id)

    def take(self, router_id: str) -> CacheChange | None:
        """The next part of a router's changes; None when there are none."""
        self._count()
        unsent = self._unsent.get(router_id)
        if not unsent and router_id not in self._new:
            return None
        sent = dict(islice((unsent or {}).items(), _MAX_HINTS))
        for hint in sent:
            del self._unsent[router_id][hint]
        reset = router_id in self._new
        self._new.discard(router_id)
        return CacheChange(
            reset=reset,
            added=b"".join(hint for hint, here in sent.items() if here),
            removed=b"".join(hint for hint, here in sent.items() if not here),
        )


class _Queue:
    """Steps that one router has not taken yet."""

    def __init__(self) -> None:
        self._steps: asyncio.Queue[RouterEvents | None] = asyncio.Queue()
        self._since = 0.0  # when the router took one, or the first was queued

    @property
    def waited_s(self) -> float:
        """Seconds for which steps have been queued and none was taken."""
        return 0.0 if self._steps.empty() else time.monotonic() - self._since

    def put(self, step: RouterEvents) -> None:
        if self._steps.empty():
            self._since = time.monotonic()
        self._steps.put_nowait(step)

    def end(self, *, drop: bool = False) -> None:
        """Close the queue behind what is in it, or instead of it with `drop`."""
        while drop and not self._steps.empty():
            self._steps.get_nowait()
        self._steps.put_nowait(None)

    async def get(self) -> RouterEvents | None:
        step = await self._steps.get()
        self._since = time.monotonic()
        return step


class EventPublisher:
    """Fans step events out to subscribed routers. Lives on the event loop; not thread-safe.

    When a stream ends, its router is gone: `on_gone(router_id)` lets the worker cancel its
    requests. A second stream with the same id replaces the first and cancels those requests too.
    Changes of `cache` travel with the next batch.

    A router that takes no event for `patience_s` while events are queued counts as gone; its queue
    is dropped.
    """

    def __init__(
        self,
        *,
        epoch: int,
        heartbeat_s: float,
        patience_s: float = 20.0,
        report: Callable[[], tuple[WorkerState, Role, WorkerLoad]],
        on_gone: Callable[[str], object],
    ) -> None:
        self._epoch = epoch
        self._heartbeat_s = heartbeat_s
        self._patience_s = patience_s
        self._report = report
        self._on_gone = on_gone
        self._queues: dict[str, _Queue] = {}
        self.cache = CacheFeed()

    def knows(self, router_id: str) -> bool:
        return router_id in self._queues

    def publish(self, events: dict[str, RouterEvents]) -> None:
        """Queue one batch for each router named; events of routers that left are dropped."""
        for router_id, step in events.items():
            queue = self._queues.get(router_id)
            if queue is None:
                continue
            queue.put(step)
            if queue.waited_s > self._patience_s:
                log.warning("router takes no events", extra={"router": router_id})
                queue.end(drop=True)
                self._gone(router_id)

    def tell_all(self, but: Container[str] = ()) -> None:
        """Report to every router at once, without events, but for those routers."""
        for router_id, queue in self._queues.items():
            if router_id not in but:
                queue.put(RouterEvents())

    async def stream(self, router_id: str) -> AsyncIterator[EventBatch]:
        """Batches for one router until it leaves, another stream replaces this, or close()."""
        queue = _Queue()
        replaced = self._queues.get(router_id)
        self._queues[router_id] = queue
        self.cache.open(router_id)
        if replaced is not None:
            replaced.end()
            self._on_gone(router_id)
        try:
            yield self._batch(RouterEvents(), self.cache.take(router_id))
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        step = await queue.get()
                except TimeoutError:
                    step = RouterEvents()
                if step is None:
                    return
                current = self._queues.get(router_id) is queue
                cache = self.cache.take(router_id) if current else None
                yield self._batch(step, cache)
        finally:
            if self._queues.get(router_id) is queue:
                self._gone(router_id)

    def close(self) -> None:
        """End every stream behind its queued events. Requests are not cancelled: they have to fail,
        so that routers resume them elsewhere."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.end()

    def _gone(self, router_id: str) -> None:
        del self._queues[router_id]
        self.cache.close(router_id)
        self._on_gone(router_id)

    def _batch(self, step: RouterEvents, cache: CacheChange | None) -> EventBatch:
        state, role, load = self._report()
        return EventBatch(
            epoch=self._epoch,
            state=state,
            role=role,
            load=load,
            tokens=tuple(step.tokens),
            scores=tuple(step.scores),
            failures=tuple(step.failures),
            spans=tuple(step.spans),
            prompts=tuple(step.prompts),
            cache=cache,
        )
