"""Asks workers for prompts that wait there and would be late, so that they are in time elsewhere.

A worker that has not begun with a prompt gives it back: its attempt ends, and the next one goes to
the worker that was found for it (router.dispatch.sequence_run). Otherwise nothing happens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass

from concurrency.event_loop import Tasks
from protocol.ids import RequestKey, Role
from protocol.messages import Cancel
from router.config import RouterConfig
from router.workers.bookkeeping import BreakerState
from router.workers.prompt_queues import (
    ASKED_S,
    LOOK_S,
    MAX_GIVEN_BACK,
    PromptQueue,
    find_move,
)
from router.workers.worker_client import WorkerClient
from router.workers.worker_set import WorkerSet
from rpc.methods import CANCEL

#: Where decode should compute a prompt only if that gains more, it is not there to keep the times
#: at which workers aim (0.2 s, worker_runtime.scheduling.prompt_order).
_MAX_GAIN_S = 0.2
#: Of many workers so many of a role are looked at as places to go to.
_MAX_TARGETS = 4


@dataclass(slots=True)
class _Placed:
    """A prompt that waits on a worker. target: to which it should go, once that was asked for, with
    the tokens that this has to compute then; until when they count there."""

    worker: WorkerClient
    target: WorkerClient | None = None
    tokens: int = 0
    until: float = 0.0


class Recalls:
    """The prompts of one router that may leave their workers, on its event loop."""

    def __init__(
        self,
        workers: WorkerSet,
        *,
        config: RouterConfig,
        rng: random.Random,
    ) -> None:
        self._workers = workers
        self._enabled = 0.0 < config.local_gain_s < _MAX_GAIN_S
        self._rng = rng
        self._clock = time.monotonic
        self._placed: dict[RequestKey, _Placed] = {}
        self._tasks = Tasks()
        self._next_look = 0.0
        self._timer: asyncio.TimerHandle | None = None
        workers.on_load = self.look

    def placed(self, key: RequestKey, worker: WorkerClient, *, num_before: int) -> None:
        """A prompt waits on a worker, after `num_before` others that gave it back."""
        if self._enabled and num_before < MAX_GIVEN_BACK:
            self._placed[key] = _Placed(worker)

    def computed(self, key: RequestKey) -> None:
        """A prompt does not wait any more."""
        self._placed.pop(key, None)

    def ended(self, key: RequestKey) -> WorkerClient | None:
        """An attempt has ended; the worker to go to if it was given back. Idempotent."""
        placed = self._placed.pop(key, None)
        return None if placed is None else placed.target

    def look(self) -> None:
        """A worker has reported: look for a prompt that should leave, now or soon."""
        if self._placed and self._timer is None:
            left_s = max(0.0, self._next_look - self._clock())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    def _look(self) -> None:
        now, self._timer = self._clock(), None
        self._next_look = now + LOOK_S
        coming: Counter[WorkerClient] = Counter()
        sources: dict[WorkerClient, None] = {}
        for each in self._placed.values():
            if each.target is None:
                sources[each.worker] = None
            elif now < each.until:
                coming[each.target] += each.tokens
        targets = (w for role in Role for w in self._sample(role))
        queues = {
            worker: _queue(worker, now, coming[worker])
            for worker in dict.fromkeys((*sources, *targets))
            if worker.connected
        }
        found = find_move(queues, self._may_leave)
        if found is None:
            return
        key, tokens, source, target = found
        placed = self._placed[key]
        placed.target, placed.tokens, placed.until = target, tokens, now + ASKED_S
        ask = Cancel(keys=(key,), unless_begun=True)
        self._tasks.start(source.calls.call(CANCEL, ask))

    def _sample(self, role: Role) -> list[WorkerClient]:
        ready = self._workers.ready(role)
        few = len(ready) <= _MAX_TARGETS
        return ready if few else self._rng.sample(ready, _MAX_TARGETS)

    def _may_leave(self, key: RequestKey, worker: WorkerClient) -> bool:
        placed = self._placed.get(key)
        return placed is not None and placed.worker is worker and placed.target is None


def _queue(worker: WorkerClient, now: float, coming_tokens: int) -> PromptQueue:
    """Its prompts; others of so many tokens are about to come."""
    closed = worker.breaker.state is BreakerState.CLOSED
    takes = worker.ready and closed and not worker.calls.still
    return PromptQueue(
        load=worker.load,
        role=worker.role,
        age_s=now - worker.heard_at,
        unseen_tokens=worker.reservations.tokens + coming_tokens,
        room_tokens=worker.free_tokens if takes else 0,
    )
