"""A worker on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.devices import StepTime
from engine.batch import StepBatch, StepResult
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import CacheChange, KVFingerprint, KVLayout, hints
from protocol.loads import waiting
from protocol.messages import Submit, WorkerLoad
from router.workers.bookkeeping import PrefixView, PromptBlocks, Reservations
from router.workers.policy import WorkerView
from router.workers.prompt_queues import PromptQueue
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.messages import (
    Command,
    Granted,
    RequestCancelled,
    RoleChanged,
    Snapshot,
    Submitted,
)

FINGERPRINT = KVFingerprint(
    model="simulated",
    weights="",
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    dtype="bfloat16",
    rope="",
)
#: A step is planned so long before the one in flight ends, and launched so fast when none is.
_LEAD_S = 2.5e-3
_LAUNCH_S = 0.3e-3
_LAND_S = 0.15e-3
#: One message between two processes; commit of a hand-off whose last layer has just left.
MESSAGE_S = 0.6e-3
COMMIT_S = 1.2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds of one message, from a client's request until it is placed, and of a commit, within
    `commit_spread` of it by chance; a token of the prompt adds to both."""

    message_s: float = MESSAGE_S
    place_s: float = 0.0
    place_token_s: float = 0.0
    commit_s: float = COMMIT_S
    commit_token_s: float = 0.0
    commit_spread: tuple[float, float] = (1.0, 1.0)


class Worker:
    """The schedulers of both roles, and a device that runs their steps one after the other, planned
    one ahead."""

    def __init__(
        self,
        clock: Clock,
        scheduler: BothRoles,
        ref: WorkerRef,
        step_time: StepTime,
        publish: Callable[[Worker, Any], None],
        message_s: float = MESSAGE_S,
    ) -> None:
        self.ref = ref
        self._message_s = message_s
        self.role = scheduler.role
        self.prefix = PrefixView()
        self._cache: dict[bytes, bool] = {}  # not reported yet
        self.load = scheduler.snapshot().load
        self.reservations = Reservations()
        self._clock = clock
        self._scheduler = scheduler
        self._step_time = step_time
        self._publish = publish
        self._steps: deque[StepBatch] = deque()
        self._free_at = 0.0
        self._planning = False
        self._num_submits = 0
        self._heard_at = 0.0
        self._told: list[tuple[RequestKey, bool]] = []
        #: Called when a report has come.
        self.on_report: Callable[[], None] = lambda: None

    def submit(self, submit: Submit, role: Role) -> None:
        self._num_submits += 1
        self.tell(Submitted(submit=submit, role=role))
        self.reservations.submitted(submit.key, self._num_submits)

    def change(self, role: Role) -> None:
        """Take the work of another role."""
        self.role = role
        self.tell(RoleChanged(role=role))

    def load_now(self) -> WorkerLoad:
        """What the worker itself knows."""
        return replace(self.snapshot().load, clock=self._clock.now)

    def snapshot(self) -> Snapshot:
        """The state of its schedulers; orders copies between tiers."""
        snapshot = self._scheduler.snapshot()
        self._cache |= snapshot.cache
        return snapshot

    def tell(self, command: Command) -> None:
        """A command for the scheduler."""
        self._scheduler.handle(command, self._clock.now)
        if isinstance(command, RequestCancelled | Granted | Submitted):
            self._report()
        self._plan_soon()

    def queue(self, layout: KVLayout, coming_tokens: int) -> PromptQueue:
        """Its prompts as the router sees them; others of so many tokens are about to come."""
        return PromptQueue(
            load=self.load,
            role=self.role,
            age_s=self._clock.now - self._heard_at,
            unseen_tokens=self.reservations.tokens + coming_tokens,
            room_tokens=layout.tokens_in(max(0, self.load.free_blocks - self.reservations.blocks)),
        )

    def view(self, layout: KVLayout, prompt: PromptBlocks | None = None) -> WorkerView:
        """This worker as the router sees it for a prompt."""
        names = () if prompt is None else prompt.hints(FINGERPRINT, layout.block_size)
        cached_tokens = self.prefix.num_held(names) * layout.block_size
        return WorkerView(
            ref=self.ref,
            load=self.load,
            capacity=layout.num_blocks * layout.block_size,
            layout=layout,
            fingerprint=FINGERPRINT,
            unseen_sequences=self.reservations.sequences,
            unseen_tokens=self.reservations.tokens,
            unseen_blocks=self.reservations.blocks,
            cached_tokens=cached_tokens,
            expected_tokens=cached_tokens,
        )

    def _plan_soon(self) -> None:
        if not self._planning and len(self._steps) < 2:
            self._planning = True
            self._clock.at(self._free_at - _LEAD_S if self._steps else 0.0, self._plan)

    def _plan(self) -> None:
        self._planning = False
        batch = self._scheduler.plan(self._clock.now)
        if batch is not None:
            self._scheduler.launched(0)
            launched = self._clock.now + (0.0 if self._steps else _LAUNCH_S)
            self._free_at = max(launched, self._free_at) + self._step_time(batch)
            self._steps.append(batch)
            self._clock.at(self._free_at + _LAND_S, self._land)
            self._plan_soon()
        self._report()

    def _land(self) -> None:
        batch = self._steps.popleft()
        tokens = tuple(None if step.sampling is None else 7 for step in batch.sequences)
        self._scheduler.apply(StepResult(tokens=tokens), self._clock.now)
        self._report()
        self._plan_soon()

    def _report(self) -> None:
        """Load travels with events, and when other prompts wait."""
        load = self.load_now()
        out = self._scheduler.take_output()
        if out.events or waiting(load.prompts) != self._told:
            self._told = waiting(load.prompts)
            change = CacheChange(
                added=hints(name for name, kept in self._cache.items() if kept),
                removed=hints(name for name, kept in self._cache.items() if not kept),
            )
            self._cache = {}
            self._clock.after(self._message_s, self._reported, load, change, self._num_submits)
        self._publish(self, out)

    def _reported(self, load: WorkerLoad, change: CacheChange, num_submits: int) -> None:
        self.load, self._heard_at = load, self._clock.now
        self.prefix.take(change)
        self.reservations.reported(num_submits)
        self.on_report()
