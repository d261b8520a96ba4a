"""What the two schedulers share: the requests of a worker, how they end, what routers are told.

Pure: commands and a clock in, a batch and an output out. `worker_runtime.step_loop` drives it on a
thread of its own, and hands each turn's `Output` and `Snapshot` to the event loop.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec.structs import replace

from engine.batch import StepBatch, StepResult
from engine.kv.allocator import BlockAllocator
from protocol.errors import DeadlineExceeded, ErrorInfo
from protocol.ids import RequestKey
from protocol.kv_layout import KVFingerprint
from protocol.logprobs import TokenLogprobs
from protocol.messages import FailEvent, TokenEvent, WorkerLoad
from protocol.states import FinishReason
from protocol.timeline import Phase, Span
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.inflight_steps import InflightSteps, Row
from worker_runtime.scheduling.messages import (
    CANCELLED,
    FAILED,
    FINISHED,
    RELEASED,
    RequestCancelled,
    RouterCommand,
    RouterGone,
    Snapshot,
    StepOutput,
    Submitted,
)
from worker_runtime.scheduling.prefix_cache import PrefixCache
from worker_runtime.scheduling.sequence import Sequence


@dataclass(slots=True)
class SchedulerEntry(ABC):
    """A request on a worker; `order` is its seniority (first arrived is served first)."""

    sequence: Sequence
    order: int

    @property
    def router_id(self) -> str:
        """Who is told about it."""
        return self.sequence.submit.router_id

    @property
    @abstractmethod
    def ending(self) -> bool:
        """Whether its outcome was told, and it only waits for its hand-off to let go of blocks."""


E = TypeVar("E", bound=SchedulerEntry)
C = TypeVar("C")
Out = TypeVar("Out", bound=StepOutput)


class Scheduler(ABC, Generic[E, C, Out]):
    """Decides what a worker does next. Not thread-safe: the step thread owns it. E: its entries,
    C: what its side of the hand-off tells it."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        blocks: BlockAllocator,
        fingerprint: KVFingerprint,
        place: str,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._cache = PrefixCache(
            blocks, fingerprint=fingerprint, enabled=config.enable_prefix_caching
        )
        self._place = place
        self._entries: dict[RequestKey, E] = {}
        self._next_order = 0
        self._num_commands = 0
        self._due = math.inf  # no deadline comes before this
        self._flight: InflightSteps[E] = InflightSteps()
        self.num_finished = 0
        self.num_failed = 0
        self.num_cancelled = 0
        self.num_released = 0

    # --- what the workers differ in --------------------------------------------------------------

    @abstractmethod
    def new_output(self) -> Out:
        """An empty output for the next turn."""

    @abstractmethod
    def admit(self, now: float, out: Out) -> None:
        """Give what has come in what it can have before the next plan."""

    @abstractmethod
    def plan(self, now: float, out: Out) -> StepBatch | None:
        """Expire, admit, and choose the tokens of the next step; None when nothing can run. The
        step counts as launched; its result, or that of the one before, goes to `apply` next."""

    @abstractmethod
    def launched(self, step: int, out: Out) -> None:
        """The planned step runs under this number (engine.executor.PendingStep)."""

    @abstractmethod
    def apply(self, result: StepResult, now: float, out: Out) -> None:
        """Take the oldest step in flight in."""

    @abstractmethod
    def load(self) -> WorkerLoad:
        """Figures for the routers."""

    @abstractmethod
    def _enter(self, sequence: Sequence, order: int) -> E:
        """The entry of a request that has just arrived."""

    @abstractmethod
    def _handoff(self, command: C, now: float, out: Out) -> None:
        """Take in what happened to a hand-off."""

    @abstractmethod
    def _leave(self, entry: E, out: Out, *, released: bool, error: ErrorInfo | None) -> None:
        """Let go of a request that did not finish, and of its hand-off."""

    @abstractmethod
    def _finished(self, entry: E, out: Out) -> None:
        """Let go of a request whose last token was sampled, or whose prompt was all it wanted."""

    @abstractmethod
    def _spans(self, entry: E) -> tuple[Span, ...]:
        """Its part of the request's timeline."""

    # --- commands -------------------------------------------------------------------------------

    def handle(self, command: C | RouterCommand, now: float, out: Out) -> None:
        """Take one command in."""
        self._num_commands += 1
        match command:
            case Submitted(submit=submit, matcher=matcher):
                if submit.key not in self._entries:
                    sequence = Sequence.of(submit, now, matcher)
                    sequence.mark_start(Phase.CREDIT_WAIT, now)
                    self._entries[submit.key] = self._enter(sequence, self._next_order)
                    self._next_order += 1
                    self._due = min(self._due, sequence.deadline)
            case RequestCancelled(keys=keys):
                self._cancel(keys, out)
            case RouterGone(router_id=router_id):
                self._cancel([k for k, e in self._entries.items() if e.router_id == router_id], out)
            case _:
                self._handoff(command, now, out)

    def _cancel(self, keys: Iterable[RequestKey], out: Out) -> None:
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and not entry.ending:
                self.num_cancelled += 1
                self._leave(entry, out, released=True, error=None)

    # --- events ---------------------------------------------------------------------------------

    def _scored(self, row: Row[E], logprobs: tuple[TokenLogprobs, ...], out: Out) -> None:
        """Tell of prompt tokens that a step has scored."""
        event = row.entry.sequence.score(logprobs, row.num_tokens)
        if event.finish is not None:
            event = replace(event, spans=self._spans(row.entry))
            self.num_finished += 1
            self._finished(row.entry, out)
        out.of(row.entry.router_id).scores.append(event)

    def _tell(
        self,
        entry: E,
        token: int,
        logprobs: TokenLogprobs | None,
        finish: FinishReason | None,
        out: Out,
    ) -> None:
        """Tell of the token that the sequence has just got; with `finish` it is the last."""
        sequence = entry.sequence
        event = TokenEvent(
            key=sequence.key,
            index=sequence.num_output - 1,
            token=token,
            finish=finish,
            spans=() if finish is None else self._spans(entry),
            logprobs=logprobs,
        )
        out.of(entry.router_id).tokens.append(event)
        if finish is not None:
            self.num_finished += 1
            self._finished(entry, out)

    def _fail(self, entry: E, error: ErrorInfo, *, retriable: bool, out: Out) -> None:
        """Tell that a request failed here."""
        self.num_failed += 1
        event = FailEvent(
            key=entry.sequence.key, error=error, retriable=retriable, spans=self._spans(entry)
        )
        out.of(entry.router_id).failures.append(event)

    def _expire(self, now: float, out: Out) -> None:
        """End the requests whose deadline has come."""
        if now < self._due:
            return
        for entry in list(self._entries.values()):
            if now >= entry.sequence.deadline and not entry.ending:
                error = DeadlineExceeded("the request's deadline passed", param="deadline").info()
                self._fail(entry, error, retriable=False, out=out)
                self._leave(entry, out, released=False, error=error)
        earliest = self._earliest()
        self._due = math.inf if earliest is None else earliest

    def fail_all(self, error: ErrorInfo, out: Out) -> None:
        """End every request: the engine is broken, another worker may serve them."""
        for entry in list(self._entries.values()):
            if not entry.ending:
                self._fail(entry, error, retriable=True, out=out)
                self._leave(entry, out, released=False, error=error)

    # --- views ----------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What it is like now; takes the changes of its prefix cache."""
        return Snapshot(
            load=self.load(),
            num_unfinished=self.num_unfinished,
            counters=self.counters(),
            cache=self._blocks.take_changes(),
        )

    def lasts(self, now: float) -> float:
        """Seconds for which the step on its way is sure to run on; not positive when unknown."""
        return self._flight.lasts(now)

    def next_deadline(self) -> float | None:
        """When something must be looked at even if no command arrives."""
        return self._earliest()

    def _earliest(self) -> float | None:
        """The earliest deadline of all requests."""
        alive = (e for e in self._entries.values() if not e.ending)
        return min((e.sequence.deadline for e in alive), default=None)

    def counters(self) -> dict[str, int]:
        """How requests ended here, since the start."""
        return {
            FINISHED: self.num_finished,
            FAILED: self.num_failed,
            CANCELLED: self.num_cancelled,
            RELEASED: self.num_released,
            **self._cache.counters(),
        }

    def num_lost_blocks(self) -> int:
        """Blocks in use though no request is here and no step in flight: 0, or they are lost."""
        return 0 if self._entries else self._blocks.num_held + self._blocks.num_quarantined

    @property
    def num_unfinished(self) -> int:
        """Requests that are still here, those that only let go of blocks included."""
        return len(self._entries)
