"""Control methods of a worker: submit, move, cancel, events, status, role, drain. On the event
loop."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from observability.logging import get_logger
from protocol.errors import (
    Cancelled,
    ContextTooLong,
    Internal,
    InvalidRequest,
    Overloaded,
    StaleMessage,
    Unavailable,
)
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.loads import waiting
from protocol.messages import (
    Ack,
    Cancel,
    DrainCommand,
    MoveRequest,
    RoleCommand,
    Submit,
    WorkerLoad,
    WorkerStatus,
)
from protocol.states import WorkerState, check_worker
from rpc import methods
from rpc.methods import Handler, Method
from worker_runtime.config import WorkerConfig
from worker_runtime.control.event_publisher import EventPublisher
from worker_runtime.control.grammars import Grammars
from worker_runtime.scheduling.messages import RouterEvents, Snapshot, Submitted
from worker_runtime.scheduling.prefix_cache import HASH_SLICE, hash_blocks
from worker_runtime.step_loop import StepLoop

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What one worker can hold. Routers check requests first; a worker still lets no bad id and no
    impossible length reach the engine. `capacity`: tokens of the longest sequence that the pool
    holds in a role."""

    layout: KVLayout
    vocab_size: int
    max_model_len: int
    capacity: Mapping[Role, int]

    def max_prompt_tokens(self, role: Role) -> int:
        """Longest prompt that leaves room for one output token, in the context and in the pool."""
        return min(self.max_model_len, self.capacity[role]) - 1

    def check(self, submit: Submit, role: Role) -> None:
        """Raise InvalidRequest or ContextTooLong, naming the field. All of the output is generated
        here, so that the pool must hold it, unless only the prompt is computed (prefill)."""
        ids = submit.prompt_ids
        if not ids:
            raise InvalidRequest("prompt must have at least one token", param="prompt")
        for name, some in (("prompt", ids), ("output_ids", submit.output_ids)):
            if some and not 0 <= min(some) <= max(some) < self.vocab_size:
                raise InvalidRequest(
                    f"{name} has a token id outside the vocabulary of {self.vocab_size}", param=name
                )
        for name in ("time_left_s", "waited_s"):
            if not math.isfinite(getattr(submit, name)):
                raise InvalidRequest(f"{name} must be finite", param=name)
        submit.sampling.validate(self.vocab_size)
        max_tokens = submit.sampling.max_tokens
        if len(submit.output_ids) >= max_tokens > 0:
            raise InvalidRequest("all max_tokens were generated already", param="max_tokens")
        total = len(ids) + max_tokens
        if total > self.max_model_len:
            raise ContextTooLong(
                f"prompt ({len(ids)}) + max_tokens ({max_tokens}) exceed the "
                f"context of {self.max_model_len} tokens",
                param="max_tokens",
            )
        known = len(ids) + len(submit.output_ids)
        needed = total if role is Role.DECODE else known + min(1, max_tokens)
        capacity = self.capacity[role]
        if needed > capacity:
            raise ContextTooLong(
                f"{needed} tokens do not fit the KV pool of {capacity} tokens", param="prompt"
            )


class ControlService:
    """Serves the worker methods and keeps the worker's state. Only subscribed routers may submit.

    `accept` takes a checked request, `move` a running one that leaves (both of Transfers), `cancel`
    keys, `router_gone` a router id, `role_changed` the new role; all run on the event loop. The
    first three return the command's number in the inbox.
    """

    def __init__(  # noqa: PLR0913 - one caller, every argument named
        self,
        *,
        ref: WorkerRef,
        limits: WorkerLimits,
        fingerprint: KVFingerprint,
        precision: str,
        config: WorkerConfig,
        progress: StepLoop,
        clock: Callable[[], float],
        accept: Callable[[Submitted], int],
        move: Callable[[MoveRequest], int],
        grammars: Grammars,
        cancel: Callable[[Cancel], int],
        router_gone: Callable[[str], object],
        role_changed: Callable[[Role], object],
        handoff_counters: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.ref = ref
        self.state = WorkerState.STARTING
        self.role = ref.role
        self._limits = limits
        self._fingerprint = fingerprint
        self._precision = precision
        self._config = config
        self._progress = progress
        self._clock = clock
        self._accept = accept
        self._move = move
        self._role_changed = role_changed
        self._grammars = grammars
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="block-names")
        self._preparing: Counter[RequestKey] = Counter()  # submits that await `_prepare`
        self._cancel = cancel
        self._handoff_counters = handoff_counters
        self._snapshot = Snapshot()
        self._idle = asyncio.Event()
        self._idle.set()
        self._submitted_since_snapshot = 0
        self.publisher = EventPublisher(
            epoch=ref.epoch,
            heartbeat_s=config.heartbeat_s,
            patience_s=config.patience_s,
            report=lambda: (self.state, self.role, self._load()),
            on_gone=router_gone,
        )

    def handlers(self) -> dict[Method[Any, Any], Handler]:
        return {
            methods.SUBMIT: self._on_submit,
            methods.MOVE: lambda move: Ack(num_commands=self._move(move)),
            methods.CANCEL: self._on_cancel,
            methods.EVENTS: lambda subscribe: self.publisher.stream(subscribe.router_id),
            methods.STATUS: lambda _query: self.status(),
            methods.ROLE: self._on_role,
            methods.DRAIN: self._on_drain,
        }

    # --- called by the worker -------------------------------------------------------------------

    def become(self, state: WorkerState) -> None:
        """Enter the next state; repeating the present one has no effect."""
        if state is not self.state:
            check_worker(self.state, state)
            self.state = state

    def publish(self, events: dict[str, RouterEvents], snapshot: Snapshot, accepted: int) -> None:
        """Publish the events of a step loop's iteration; `accepted` requests entered the
        scheduler."""
        changed = waiting(snapshot.load.prompts) != waiting(self._snapshot.load.prompts)
        self._snapshot = snapshot
        self.publisher.cache.change(snapshot.cache)
        self._submitted_since_snapshot -= accepted
        if snapshot.num_unfinished == 0 and self._submitted_since_snapshot == 0:
            self._idle.set()
        self.publisher.publish(events)
        if changed:
            self.publisher.tell_all(but=events)

    async def drained(self, timeout_s: float) -> bool:
        """Refuse new requests and wait until the accepted ones have ended; False on timeout."""
        await self._on_drain(DrainCommand())
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def check_health(self) -> None:
        """Raise Internal when the engine is broken or stands still. An idle worker is healthy."""
        if self._progress.broken is not None:
            raise Internal(f"the engine broke: {self._progress.broken}")
        stalled = self._progress.stalled_for()
        if stalled > self._config.stall_s:
            raise Internal(f"no progress for {stalled:.1f} s: {self._progress.standstill()}")

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            ref=self.ref,
            state=self.state,
            role=self.role,
            load=self._load(),
            layout=self._limits.layout,
            fingerprint=self._fingerprint,
            precision=self._precision,
            max_model_len=self._limits.max_model_len,
            max_prompt_tokens=self._limits.max_prompt_tokens(self.role),
            steps=self._progress.steps,
            last_step_age_s=self._clock() - self._progress.last_step_end,
            counters={**self._snapshot.counters, **self._handoff_counters()},
            tiers=self._snapshot.tiers,
        )

    def _load(self) -> WorkerLoad:
        return replace(self._snapshot.load, clock=self._clock())

    def close(self) -> None:
        self.publisher.close()
        self._hasher.shutdown(wait=False, cancel_futures=True)

    # --- methods --------------------------------------------------------------------------------

    async def _on_submit(self, submit: Submit) -> Ack:
        self._check_open(submit)
        self._limits.check(submit, self._role_for(submit))
        num_commands = self._accept(await self._prepare(submit))
        if submit.trace is not None:
            trace = {"request": submit.key.request_id, "traceparent": submit.trace.parent}
            log.debug("request accepted", extra=trace)
        self._submitted_since_snapshot += 1
        self._idle.clear()
        return Ack(num_commands=num_commands)

    async def _prepare(self, submit: Submit) -> Submitted:
        """Compile the grammar and hash the blocks of a request, off the step thread. Checks again
        what may have changed meanwhile."""
        at, matcher = self._clock(), None
        self._preparing[submit.key] += 1
        try:
            digests = await self.name_blocks(submit)
            if submit.grammar is not None:
                matcher = await self._grammars.matcher(submit)
            if not self._preparing[submit.key]:
                raise Cancelled("cancelled before it was queued")
        finally:
            self._preparing -= Counter((submit.key,))  # never below 0
        self._check_open(submit)
        role = self._role_for(submit)
        return Submitted(submit=submit, role=role, matcher=matcher, digests=digests, at=at)

    def _role_for(self, submit: Submit) -> Role:
        """What this worker does for a request, whatever its role now: its ticket says which end of
        the hand-off is here."""
        ticket = submit.ticket
        sends = ticket is not None and ticket.sender_epoch == self.ref.epoch
        return Role.PREFILL if sends else Role.DECODE

    async def name_blocks(self, submit: Submit) -> tuple[bytes, ...]:
        """Names of the full blocks of a request's tokens; none without a prefix cache."""
        if not self._config.enable_prefix_caching:
            return ()
        block_size = self._limits.layout.block_size
        hashed = partial(hash_blocks, submit, self._fingerprint, block_size)
        num_tokens = len(submit.prompt_ids) + len(submit.output_ids)
        if num_tokens <= HASH_SLICE * block_size:
            return hashed()
        return await asyncio.get_running_loop().run_in_executor(self._hasher, hashed)

    def _check_open(self, submit: Submit) -> None:
        if self._progress.broken is not None:
            raise Unavailable(f"the engine of worker {self.ref.worker_id} broke")
        if self.state is not WorkerState.READY:
            raise Unavailable(f"worker {self.ref.worker_id} is {self.state}", retry_after_s=1.0)
        if not self.publisher.knows(submit.router_id):
            raise StaleMessage(
                f"router {submit.router_id} has no event stream here", param="router_id"
            )
        waiting = self._snapshot.load.waiting + self._submitted_since_snapshot
        if waiting >= self._config.max_waiting:
            raise Overloaded(f"{waiting} requests are waiting already", retry_after_s=1.0)

    async def _on_cancel(self, cancel: Cancel) -> Ack:
        for key in () if cancel.unless_begun else cancel.keys:
            del self._preparing[key]
        return Ack(num_commands=self._cancel(cancel))

    async def _on_role(self, command: RoleCommand) -> Ack:
        """Take the work of another role. What runs here goes on; routers move it away."""
        if self.state is not WorkerState.READY:
            raise Unavailable(f"worker {self.ref.worker_id} is {self.state}")
        if command.role is not self.role:
            self.role = command.role
            log.info("role changed", extra={"worker": self.ref.worker_id, "role": self.role})
            self._role_changed(self.role)
            self.publisher.tell_all()
        return Ack()

    async def _on_drain(self, _command: DrainCommand) -> Ack:
        if self.state is WorkerState.READY:
            self.become(WorkerState.DRAINING)
            self.publisher.tell_all()
        return Ack()
