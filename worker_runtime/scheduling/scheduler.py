"""The base of both schedulers: requests of a worker, how they end, what routers are told.

Pure: commands and a clock in, a batch and an output out. `worker_runtime.step_loop` drives it on
the step thread and hands `output` and `snapshot` to the event loop.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import islice
from typing import Generic, NotRequired, TypedDict, TypeVar

from msgspec.structs import replace

from engine.batch import StepBatch, StepResult
from engine.kv.allocator import BlockAllocator
from protocol.errors import Cancelled, DeadlineExceeded, ErrorInfo, Internal
from protocol.ids import RequestKey
from protocol.kv_layout import KVFingerprint
from protocol.loads import QueuedPrompt
from protocol.messages import FailEvent, TokenEvent, WorkerLoad
from protocol.sampling import TokenLogprobs
from protocol.states import FinishReason
from protocol.timeline import Phase, Span
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.entry import RequestState, SchedulerEntry
from worker_runtime.scheduling.inflight_steps import InflightSteps, Row
from worker_runtime.scheduling.kv_prefetch import KVPrefetch
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.messages import (
    CANCELLED,
    FAILED,
    FINISHED,
    GIVEN_BACK,
    MOVED,
    NON_FINITE,
    RELEASED,
    HandoffCommand,
    RequestCancelled,
    RouterCommand,
    RouterGone,
    Snapshot,
    StepOutput,
    Submitted,
)
from worker_runtime.scheduling.peer_blocks import PeerBlocks
from worker_runtime.scheduling.prefix_cache import PrefixCache
from worker_runtime.scheduling.sequence import Sequence

E = TypeVar("E", bound=SchedulerEntry)

#: Waiting prompts that a report names; of a worker with more requests than this it names none.
_MAX_QUEUED = 32
_MAX_ENTRIES = 512


class SchedulerParts(TypedDict):
    """What a scheduler is made of."""

    config: WorkerConfig
    blocks: BlockAllocator
    fingerprint: KVFingerprint
    place: str
    tiers: NotRequired[KVTiers | None]
    peers: NotRequired[PeerBlocks | None]
    step_rows: NotRequired[tuple[int, ...]]


class Scheduler(ABC, Generic[E]):
    """Decides what a worker does next. Not thread-safe: the step thread owns it. E: its
    entries."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        blocks: BlockAllocator,
        fingerprint: KVFingerprint,
        place: str,
        tiers: KVTiers | None = None,
        peers: PeerBlocks | None = None,
        step_rows: tuple[int, ...] = (),
    ) -> None:
        """`blocks`, `tiers` and `peers` may be shared with another scheduler of the engine.
        step_rows: of the engine (engine.executor.Executor)."""
        self._config = config
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._inflight: InflightSteps[E] = InflightSteps(step_rows)
        self._peers = peers
        self._prefetch: KVPrefetch | None = None
        self._cache = PrefixCache(
            blocks,
            fingerprint=fingerprint,
            enabled=config.enable_prefix_caching,
            tiers=tiers,
            compute_s=self._compute_s,
        )
        if tiers is not None and not blocks.has_one_chain:
            self._prefetch = KVPrefetch(self._cache, blocks, tiers)
        #: Tokens of one sequence whose KV the pool must have room for beside a window's.
        self.max_chunk = config.max_num_batched_tokens
        self._dtype = fingerprint.dtype
        self._place = place
        #: Whether the engine also runs steps of another role's scheduler.
        self.shares_steps = False
        self._entries: dict[RequestKey, E] = {}
        self.output = StepOutput()
        self._next_order = 0
        self._now = 0.0  # of the latest command or plan
        self._queue: tuple[QueuedPrompt, ...] | None = None  # since then
        self._next_expiry = math.inf  # no deadline is earlier
        self._counters = dict.fromkeys(
            (FINISHED, FAILED, CANCELLED, GIVEN_BACK, RELEASED, MOVED, NON_FINITE), 0
        )

    # --- what the two kinds differ in -----------------------------------------------------------

    def admit(self, now: float) -> None:
        """Give arrived requests what they can have before the next plan."""

    @abstractmethod
    def plan(self, now: float) -> StepBatch | None:
        """Expire, admit, and choose the tokens of the next step; None when nothing can run. The
        step counts as launched; `apply` takes its result, or first that of the one before."""

    def launched(self, step: int) -> None:
        """The planned step runs under this number (engine.executor.PendingStep)."""

    @abstractmethod
    def load(self) -> WorkerLoad:
        """Load figures for the routers."""

    @abstractmethod
    def _new_entry(self, sequence: Sequence, order: int) -> E:
        """The entry of a request that has just arrived."""

    @abstractmethod
    def _handle_handoff(self, command: HandoffCommand, now: float) -> None:
        """Take one command of the hand-off."""

    @abstractmethod
    def _count(self, row: Row[E], now: float) -> None:
        """Add a landed row to the statistics of its sequence."""

    @abstractmethod
    def _sampled(self, entry: E, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Take a token that a step sampled."""

    @abstractmethod
    def _abort(self, entry: E, *, released: bool, error: ErrorInfo | None) -> None:
        """Drop a request that did not finish, and end its hand-off."""

    @abstractmethod
    def _complete(self, entry: E) -> None:
        """Drop a request that finished here."""

    @abstractmethod
    def _wants_tokens(self, entry: E) -> bool:
        """Whether results of its steps are still used."""

    @abstractmethod
    def _stopped(self, entry: E) -> None:
        """A row of an entry landed that does not run any more."""

    @abstractmethod
    def _expected(self) -> Iterable[tuple[E, int, float]]:
        """Prompts that wait, in the order in which they run, with the tokens left of each and when
        its first token should be there."""

    @abstractmethod
    def _spans(self, entry: E) -> tuple[Span, ...]:
        """Its part of the request's timeline."""

    # --- commands -------------------------------------------------------------------------------

    def handle(self, command: HandoffCommand | RouterCommand, now: float) -> None:
        self._now, self._queue = now, None
        match command:
            case Submitted():
                self._submitted(command, now)
            case RequestCancelled(keys=keys, unless_begun=True):
                self._give_back(keys)
            case RequestCancelled(keys=keys):
                self._cancel(keys)
            case RouterGone(router_id=router_id):
                self._cancel([k for k, e in self._entries.items() if e.router_id == router_id])
            case _:
                self._handle_handoff(command, now)

    def _submitted(self, command: Submitted, now: float) -> None:
        submit = command.submit
        if submit.key in self._entries:
            return
        tables = self._blocks.new_tables()
        at = min(now, command.at)
        sequence = Sequence.from_submit(submit, at, command.matcher, command.digests, tables)
        sequence.stats.begin(Phase.CREDIT_WAIT, now)
        self._entries[submit.key] = self._new_entry(sequence, self._next_order)
        self._next_order += 1
        self._next_expiry = min(self._next_expiry, sequence.deadline)

    def _cancel(self, keys: Iterable[RequestKey]) -> None:
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and not entry.ending:
                self._counters[CANCELLED] += 1
                self._abort(entry, released=True, error=None)

    def _give_back(self, keys: Iterable[RequestKey]) -> None:
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.untouched:
                self._counters[GIVEN_BACK] += 1
                event = FailEvent(
                    key=key,
                    error=Cancelled("given back to its router").info(),
                    spans=self._spans(entry),
                    retriable=True,
                    given_back=True,
                )
                self.output.events_for(entry.router_id).failures.append(event)
                self._abort(entry, released=True, error=None)

    # --- results --------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> None:
        """Take the result of the oldest step in flight."""
        rows = self._inflight.land(now, result.device_s)
        for index, (row, token) in enumerate(zip(rows, result.tokens, strict=True)):
            entry, sequence = row.entry, row.entry.sequence
            self._count(row, now)
            if index in result.non_finite:
                self._reject(entry)
            elif entry.state is not RequestState.GONE:
                self._cache.publish(sequence, row.num_tokens)
                if self._blocks.has_windows and not entry.keeps_window:
                    self._blocks.free(sequence.tables.drop_unseen(sequence.num_computed))
                if sequence.scoring and self._wants_tokens(entry):
                    self._emit_scores(row, result.target_logprobs.get(index, ()))
                if token is not None and self._wants_tokens(entry):
                    self._sampled(entry, token, result.logprobs.get(index), now)
            if entry.state is not RequestState.RUNNING:
                self._stopped(entry)

    def passed(self, now: float) -> None:
        """A step of another scheduler on the same engine has landed."""
        self._inflight.passed(now)

    def go_on(self, sequence: Sequence, now: float) -> None:
        """The load that a sequence waited for, of another sequence, is over."""
        self._cache.go_on(sequence, now)

    def _compute_s(self, start: int, end: int) -> float:
        """Seconds that tokens start .. end - 1 of a prompt take; 0 when unknown."""
        return self._inflight.prompt_s(start, end, self._config.max_num_batched_tokens)

    def _brings(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence should wait before it starts: its KV is on its way."""
        return any(
            each is not None and each.brings(sequence, self._compute_s, now)
            for each in (self._prefetch, self._peers)
        )

    def _release(self, entry: E) -> None:
        """Free the blocks of an entry that does not run any more, unless a step in flight writes to
        them."""
        if not entry.sequence.in_flight:
            self._cache.released(entry.sequence)
            self._blocks.free(entry.sequence.drop_kv())

    def _reject(self, entry: E) -> None:
        """Fail a request whose logits or hidden states are not finite; its KV is never reused."""
        self._cache.withdraw(entry.sequence)
        if not self._wants_tokens(entry):
            return
        self._counters[NON_FINITE] += 1
        error = Internal(
            f"the model's output is not finite in {self._dtype}: an activation or a weight "
            "overflows",
            param="dtype",
        ).info()
        self._fail_and_abort(entry, error, retriable=False)

    def _emit_scores(self, row: Row[E], logprobs: tuple[TokenLogprobs, ...]) -> None:
        event = row.entry.sequence.score(logprobs, row.num_tokens)
        if event.finish is not None:
            event = replace(event, spans=self._spans(row.entry))
            self._counters[FINISHED] += 1
            self._complete(row.entry)
        self.output.events_for(row.entry.router_id).scores.append(event)

    def _emit_token(
        self, entry: E, token: int, logprobs: TokenLogprobs | None, finish: FinishReason | None
    ) -> None:
        """Report the token just appended; with `finish` it is the last."""
        sequence = entry.sequence
        event = TokenEvent(
            key=sequence.key,
            index=sequence.num_output - 1,
            token=token,
            finish=finish,
            spans=() if finish is None else self._spans(entry),
            logprobs=logprobs,
        )
        self.output.events_for(entry.router_id).tokens.append(event)
        if finish is not None:
            self._counters[FINISHED] += 1
            self._complete(entry)

    # --- failures -------------------------------------------------------------------------------

    def _fail(self, entry: E, error: ErrorInfo, *, retriable: bool) -> None:
        self._counters[FAILED] += 1
        event = FailEvent(
            key=entry.sequence.key, error=error, retriable=retriable, spans=self._spans(entry)
        )
        self.output.events_for(entry.router_id).failures.append(event)

    def _fail_and_abort(self, entry: E, error: ErrorInfo, *, retriable: bool) -> None:
        self._fail(entry, error, retriable=retriable)
        self._abort(entry, released=False, error=error)

    def _expire(self, now: float) -> None:
        self._now, self._queue = now, None
        if now < self._next_expiry:
            return
        for entry in list(self._entries.values()):
            if now >= entry.sequence.deadline and not entry.ending:
                error = DeadlineExceeded("the request's deadline passed", param="deadline").info()
                self._fail_and_abort(entry, error, retriable=False)
        self._next_expiry = self._earliest_deadline()

    def fail_all(self, error: ErrorInfo) -> None:
        """Fail every request: the engine is broken, and another worker may serve them."""
        for entry in list(self._entries.values()):
            if not entry.ending:
                self._fail_and_abort(entry, error, retriable=True)

    # --- views ----------------------------------------------------------------------------------

    def _queued_prompts(self) -> tuple[QueuedPrompt, ...]:
        """Those that are not due yet, of a few: where many wait, most are late everywhere."""
        if self._queue is None:
            tells = self._inflight.model.known and len(self._entries) <= _MAX_ENTRIES
            line = self._expected() if tells else ()
            queue = (entry.queued_prompt(left, ends_at) for entry, left, ends_at in line)
            due = (prompt for prompt in queue if prompt.due_at > self._now)
            self._queue = tuple(islice(due, _MAX_QUEUED))
        return self._queue

    def snapshot(self) -> Snapshot:
        """The present state; takes the changes of the prefix cache."""
        return Snapshot(
            load=self.load(),
            num_unfinished=self.num_unfinished,
            counters=self.counters(),
            cache=self._cache.take_changes(),
        )

    def remaining_s(self, now: float) -> float:
        """Seconds for which the step in flight surely runs on; not positive when unknown."""
        return self._inflight.remaining_s(now)

    def next_deadline(self) -> float:
        """When the scheduler must run again even if no command arrives; infinity for never."""
        return self._earliest_deadline()

    def _earliest_deadline(self) -> float:
        alive = (e for e in self._entries.values() if not e.ending)
        return min((e.sequence.deadline for e in alive), default=math.inf)

    def counters(self) -> dict[str, int]:
        """How requests ended here, and use of the prefix cache, since the start."""
        return {**self._counters, **self._cache.counters()}

    @property
    def num_unfinished(self) -> int:
        """Requests here, including those that only have to release blocks."""
        return len(self._entries)
