"""Continuous batching on the decode side. Pure: commands and a clock in, a batch and an output out.

Life of a sequence here (blocks held in parentheses):

    remote:  WAITING_ROOM (none) -> ARRIVING (held, the hand-off writes) -> RUNNING -> gone
    local:   WAITING (none) -> RUNNING (prompt in chunks, then decode) -> gone
    RUNNING -> WAITING when preempted: its KV is recomputed here, never asked for a second time
    ARRIVING -> ENDING (quarantined) when it is cancelled or fails: freed once no write is in flight

A step may be planned while the one before it runs. A sequence that leaves RUNNING keeps its blocks
until the last step it is part of has landed, and what those steps still sample for it is dropped
when it is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from decode_worker.commands import (
    BlocksSafe,
    Command,
    Committed,
    EndHandoff,
    HandoffEnded,
    Output,
    Reserve,
)
from engine.batch import StepBatch, StepResult
from protocol.errors import DeadlineExceeded, ErrorInfo
from protocol.ids import RequestKey
from protocol.messages import FailEvent, TokenEvent, WorkerLoad
from protocol.timeline import Phase, Span
from worker_runtime import counters
from worker_runtime.blocks import Blocks
from worker_runtime.commands import Cancelled, RouterCommand, RouterGone, Submitted
from worker_runtime.config import WorkerConfig
from worker_runtime.flight import Flight, Row
from worker_runtime.grammars import constrain
from worker_runtime.sequence import Sequence


class State(StrEnum):
    """Where a sequence is on this worker."""

    WAITING_ROOM = "waiting_room"
    ARRIVING = "arriving"
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    GONE = "gone"


@dataclass(slots=True)
class _Entry:
    """A sequence with its state; `order` is its seniority (first arrived is served first)."""

    sequence: Sequence
    state: State
    order: int


class DecodeScheduler:
    """Decides what a decode worker does next. Not thread-safe: the step thread owns it."""

    def __init__(
        self, *, config: WorkerConfig, blocks: Blocks, block_size: int, place: str
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._block_size = block_size
        self._place = place
        self._watermark = int(config.watermark * blocks.num_blocks)
        self._entries: dict[RequestKey, _Entry] = {}
        self._next_order = 0
        self._rows: list[Row[_Entry]] = []
        self._flight: Flight[_Entry] = Flight()
        self._short: _Entry | None = None
        self.num_preemptions = 0
        self.num_finished = 0
        self.num_failed = 0
        self.num_cancelled = 0

    # --- commands -------------------------------------------------------------------------------

    def handle(self, command: Command | RouterCommand, now: float, out: Output) -> None:
        """Take one command in."""
        match command:
            case Submitted(submit=submit, matcher=matcher):
                self._submitted(Sequence.of(submit, now, matcher), now)
            case Cancelled(keys=keys):
                for key in keys:
                    self._cancel(key, out)
            case RouterGone(router_id=router_id):
                gone = [k for k, e in self._entries.items() if _router(e) == router_id]
                for key in gone:
                    self._cancel(key, out)
            case Committed(key=key, first_token=token):
                self._committed(key, token, now)
            case HandoffEnded(key=key, error=error):
                self._handoff_ended(key, error, out)
            case BlocksSafe(key=key):
                self._blocks_safe(key)

    def _submitted(self, sequence: Sequence, now: float) -> None:
        if sequence.key in self._entries:
            return
        remote = sequence.submit.peer is not None
        sequence.mark_start(Phase.CREDIT_WAIT, now)
        state = State.WAITING_ROOM if remote else State.WAITING
        self._entries[sequence.key] = _Entry(sequence, state, self._next_order)
        self._next_order += 1

    def _cancel(self, key: RequestKey, out: Output) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.state is State.ENDING:
            return
        self.num_cancelled += 1
        self._drop(entry, out, released=True, error=None)

    def _committed(self, key: RequestKey, first_token: int, now: float) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.state is not State.ARRIVING:
            return
        sequence = entry.sequence
        sequence.num_computed = len(sequence.tokens)
        sequence.append(first_token)
        sequence.mark_start(Phase.DECODE_QUEUE, now)
        entry.state = State.RUNNING

    def _handoff_ended(self, key: RequestKey, error: ErrorInfo | None, out: Output) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.state not in (State.WAITING_ROOM, State.ARRIVING):
            return
        if error is not None:
            self._fail(entry, error, retriable=True, out=out)
        if entry.state is State.ARRIVING:
            self._blocks.quarantine(entry.sequence.block_ids)
            entry.state = State.ENDING
        else:
            self._forget(entry)

    def _blocks_safe(self, key: RequestKey) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.state is State.ENDING:
            self._blocks.unquarantine(entry.sequence.block_ids)
            entry.sequence.block_ids = []
            self._forget(entry)

    # --- plan -----------------------------------------------------------------------------------

    def plan(self, now: float, out: Output) -> StepBatch | None:
        """Expire, admit, and choose the tokens of the next step; None when nothing can run. The
        step counts as launched; its result, or that of the one before, goes to `apply` next."""
        self._expire(now, out)
        self._constrain(out)
        if self._short is None or self._short.state is not State.RUNNING:
            self._admit(now, out)
        self._short = None
        self._rows = []
        budget = self._config.max_num_batched_tokens
        for entry, num_runnable in self._runnable():
            if budget == 0 or len(self._rows) == self._config.max_num_seqs:
                break
            if entry.state is State.RUNNING:  # an older one may have preempted it just now
                budget -= self._take(entry, num_runnable, budget, now)
        return self._flight.launch(self._rows, now)

    def _constrain(self, out: Output) -> None:
        """Masks for the sequences that have a new token; one whose grammar gives up fails."""
        alive = (e for e in self._entries.values() if e.state is not State.ENDING)
        for key, error in constrain(e.sequence for e in alive):
            self._fail(self._entries[key], error, retriable=False, out=out)
            self._drop(self._entries[key], out, released=False, error=error)

    def _runnable(self) -> list[tuple[_Entry, int]]:
        """Decoding sequences first, so that a prompt's chunk never takes their place; then by
        age."""
        running = (e for e in self._entries.values() if e.state is State.RUNNING)
        counted = [(e, count) for e in running if (count := e.sequence.num_runnable)]
        return sorted(counted, key=lambda pair: (pair[1] > 1, pair[0].order))

    def _take(self, entry: _Entry, num_runnable: int, budget: int, now: float) -> int:
        sequence = entry.sequence
        num_tokens = min(num_runnable, budget)
        start = sequence.num_computed + sequence.num_in_flight
        if not self._make_room(entry, start + num_tokens):
            return 0
        if sequence.index is None:
            sequence.mark_end(Phase.DECODE_QUEUE, now)
        sequence.mark_start(Phase.DECODE if num_runnable == 1 else Phase.LOCAL_PREFILL, now)
        self._rows.append(Row(entry, num_tokens, num_tokens == num_runnable))
        return num_tokens

    def _make_room(self, entry: _Entry, num_positions: int) -> bool:
        """Give `entry` blocks for its next positions, preempting younger sequences if there are
        none; a victim in flight gives its blocks when it has landed, so `entry` sits this step
        out."""
        held = entry.sequence.block_ids
        missing = -(-num_positions // self._block_size) - len(held)
        while missing > 0:
            fresh = self._blocks.allocate(missing)
            if fresh is not None:
                held.extend(fresh)
                break
            victim = self._youngest_running()
            self._preempt(victim)
            if victim is entry:
                return False
            if victim.sequence.num_in_flight:
                self._short = entry
                return False
        return True

    def _youngest_running(self) -> _Entry:
        running = (e for e in self._entries.values() if e.state is State.RUNNING)
        return max(running, key=lambda e: e.order)

    def _preempt(self, entry: _Entry) -> None:
        self.num_preemptions += 1
        entry.sequence.num_preemptions += 1
        entry.state = State.WAITING
        self._rows = [row for row in self._rows if row.entry is not entry]
        self._settle(entry)

    def _settle(self, entry: _Entry) -> None:
        """Take the blocks of a sequence that runs no more, unless a step in flight writes to
        them."""
        sequence = entry.sequence
        if sequence.num_in_flight == 0:
            self._blocks.free(sequence.block_ids)
            sequence.block_ids = []
            sequence.num_computed = 0

    def _admit(self, now: float, out: Output) -> None:
        """Give blocks to waiting sequences, oldest first; one that does not fit is passed over,
        until it has waited `starvation_s`: then younger ones wait for it."""
        slots = self._config.max_num_seqs - self._count(State.RUNNING, State.ARRIVING)
        for entry in sorted(self._waiting(), key=lambda e: (-e.sequence.submit.priority, e.order)):
            if slots <= 0:
                return
            if self._admit_one(entry, now, out):
                slots -= 1
            elif now - entry.sequence.arrival > self._config.starvation_s:
                return

    def _admit_one(self, entry: _Entry, now: float, out: Output) -> bool:
        sequence = entry.sequence
        if sequence.num_in_flight:
            return False  # preempted, and its last step has not landed
        needed = self._needed(sequence)
        spare = self._watermark if self._count(State.RUNNING, State.ARRIVING) else 0
        if needed + spare > self._blocks.num_free:
            return False
        blocks = self._blocks.allocate(needed)
        if blocks is None:
            return False
        sequence.block_ids = blocks
        sequence.mark_end(Phase.CREDIT_WAIT, now)
        if entry.state is State.WAITING:
            entry.state = State.RUNNING
        else:
            entry.state = State.ARRIVING
            prompt_blocks = -(-len(sequence.tokens) // self._block_size)
            granted = tuple(blocks[:prompt_blocks])
            out.reserves.append(Reserve(key=sequence.key, block_ids=granted, num_cached_blocks=0))
        return True

    def _needed(self, sequence: Sequence) -> int:
        """Blocks for everything known plus the next token."""
        return -(-(len(sequence.tokens) + 1) // self._block_size)

    # --- apply ----------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float, out: Output) -> None:
        """Take the tokens of the oldest step in flight in; finished sequences leave and free their
        blocks."""
        for row, token in zip(self._flight.land(now), result.tokens, strict=True):
            entry = row.entry
            if row.num_tokens > 1 or not row.samples:
                entry.sequence.num_chunks += 1
                entry.sequence.mark_end(Phase.LOCAL_PREFILL, now)
            if token is not None and entry.state is not State.GONE:
                self._sampled(entry, token, now, out)
            if entry.state is not State.RUNNING:
                self._settle(entry)

    def _sampled(self, entry: _Entry, token: int, now: float, out: Output) -> None:
        sequence = entry.sequence
        sequence.num_steps += 1
        finish = sequence.append(token)
        sequence.mark_start(Phase.DECODE, now)
        sequence.mark_end(Phase.DECODE, now)
        spans = self._spans(sequence) if finish is not None else ()
        out.of(_router(entry)).tokens.append(
            TokenEvent(
                key=sequence.key,
                index=sequence.num_output - 1,
                token=token,
                finish=finish,
                spans=spans,
            )
        )
        if finish is not None:
            self.num_finished += 1
            self._forget(entry)

    # --- ends -----------------------------------------------------------------------------------

    def _expire(self, now: float, out: Output) -> None:
        late = [
            e
            for e in self._entries.values()
            if e.state is not State.ENDING and now >= e.sequence.submit.deadline
        ]
        for entry in late:
            error = DeadlineExceeded("the request's deadline passed", param="deadline").info()
            self._fail(entry, error, retriable=False, out=out)
            self._drop(entry, out, released=False, error=error)

    def _fail(self, entry: _Entry, error: ErrorInfo, *, retriable: bool, out: Output) -> None:
        self.num_failed += 1
        event = FailEvent(
            key=entry.sequence.key,
            error=error,
            retriable=retriable,
            spans=self._spans(entry.sequence),
        )
        out.of(_router(entry)).failures.append(event)

    def _drop(self, entry: _Entry, out: Output, *, released: bool, error: ErrorInfo | None) -> None:
        """Forget a sequence that did not finish; blocks that may be written to go into
        quarantine."""
        sequence = entry.sequence
        if entry.state in (State.WAITING_ROOM, State.ARRIVING):
            out.ends.append(EndHandoff(key=sequence.key, released=released, error=error))
        if entry.state is State.ARRIVING:
            self._blocks.quarantine(sequence.block_ids)
            entry.state = State.ENDING
            return
        self._forget(entry)
        self._settle(entry)

    def _forget(self, entry: _Entry) -> None:
        entry.state = State.GONE
        del self._entries[entry.sequence.key]

    def fail_all(self, error: ErrorInfo, out: Output) -> None:
        """End every request: the engine is broken, another worker may serve them."""
        for entry in list(self._entries.values()):
            if entry.state is not State.ENDING:
                self._fail(entry, error, retriable=True, out=out)
                self._drop(entry, out, released=False, error=error)

    # --- views ----------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """Figures for the routers. Credits are what a new request could get: free blocks less the
        watermark and less what those already waiting will take."""
        waiting = self._waiting()
        promised = sum(self._needed(e.sequence) for e in waiting)
        return WorkerLoad(
            running=self._count(State.RUNNING, State.ARRIVING),
            waiting=len(waiting),
            waiting_tokens=sum(e.sequence.num_uncomputed for e in waiting),
            free_blocks=max(0, self._blocks.num_free - self._watermark - promised),
            total_blocks=self._blocks.num_blocks,
            tokens_per_second=self._flight.tokens_per_second(),
            held_blocks=self._blocks.num_held,
            cached_blocks=self._blocks.num_cached,
            quarantined_blocks=self._blocks.num_quarantined,
        )

    def next_deadline(self) -> float | None:
        """The earliest deadline among all requests."""
        alive = (e for e in self._entries.values() if e.state is not State.ENDING)
        return min((e.sequence.submit.deadline for e in alive), default=None)

    def counters(self) -> dict[str, int]:
        """How requests ended here, since the start."""
        return {
            counters.FINISHED: self.num_finished,
            counters.FAILED: self.num_failed,
            counters.CANCELLED: self.num_cancelled,
            counters.PREEMPTIONS: self.num_preemptions,
        }

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended here, those in quarantine included."""
        return len(self._entries)

    def _waiting(self) -> list[_Entry]:
        states = (State.WAITING, State.WAITING_ROOM)
        return [e for e in self._entries.values() if e.state in states]

    def _count(self, *states: State) -> int:
        return sum(e.state in states for e in self._entries.values())

    def _spans(self, sequence: Sequence) -> tuple[Span, ...]:
        return sequence.spans(
            self._place,
            {
                Phase.DECODE: {
                    "steps": sequence.num_steps,
                    "preemptions": sequence.num_preemptions,
                },
                Phase.LOCAL_PREFILL: {
                    "tokens": len(sequence.submit.prompt_ids),
                    "chunks": sequence.num_chunks,
                },
                Phase.CREDIT_WAIT: {"blocks": self._needed(sequence)},
            },
        )


def _router(entry: _Entry) -> str:
    return entry.sequence.submit.router_id
