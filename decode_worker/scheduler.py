"""Continuous batching on a decode worker. Pure: commands and a clock in, a batch and output out.

A step may be planned while the one before it runs. A sequence that leaves RUNNING keeps its blocks
until its last step has landed; tokens that those steps sample for a request that is gone are
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Unpack

from decode_worker.admission import BlockAdmission, num_received
from decode_worker.chunking import PromptBudget
from decode_worker.commit_delays import CommitDelays
from decode_worker.departures import Departures, kept_in_vain
from decode_worker.expected import expected, waiting_work
from decode_worker.lifecycle import ADMITTED, QUEUED, DecodeEntry
from engine.batch import StepBatch
from protocol.errors import ErrorInfo, HandoffFailed
from protocol.messages import PromptEvent, SpanEvent, WorkerLoad
from protocol.sampling import TokenLogprobs
from protocol.timeline import Phase, Span
from worker_runtime.scheduling.entry import RequestState
from worker_runtime.scheduling.inflight_steps import Row
from worker_runtime.scheduling.messages import (
    MOVED,
    PREEMPTIONS,
    RELEASED,
    BlocksSafe,
    CommitAnnounced,
    Committed,
    Delivered,
    EndHandoff,
    Granted,
    HandoffCommand,
    HandoffEnded,
    MoveOut,
    Sent,
)
from worker_runtime.scheduling.prompt_order import prompt_order
from worker_runtime.scheduling.scheduler import Scheduler, SchedulerParts
from worker_runtime.scheduling.sequence import Sequence, constrain


class DecodeScheduler(Scheduler[DecodeEntry]):
    """Decides what a decode worker does next."""

    def __init__(self, **parts: Unpack[SchedulerParts]) -> None:
        super().__init__(**parts)
        self._admission = BlockAdmission(self._config, self._blocks, self._cache, self._brings)
        self._departures = Departures(self._block_size)
        self._delays = CommitDelays()
        self._prompts = PromptBudget(self._config, self._inflight.model)
        self._rows: list[Row[DecodeEntry]] = []
        self._untold: list[DecodeEntry] = []  # with a first token that the router has not got yet
        #: A running sequence that waits for the blocks of a preempted one still in flight.
        self._short: DecodeEntry | None = None
        self.num_preemptions = 0

    def _new_entry(self, sequence: Sequence, order: int) -> DecodeEntry:
        remote = sequence.submit.peer is not None
        state = RequestState.AWAITING_GRANT if remote else RequestState.WAITING
        num_blocks = self._admission.num_needed(sequence, computes=not remote)
        return DecodeEntry(sequence, order, state, num_blocks)

    # --- hand-off -------------------------------------------------------------------------------

    def _handle_handoff(self, command: HandoffCommand, now: float) -> None:
        entry = self._entries.get(command.key)
        if isinstance(command, MoveOut):
            self._tell()
            self.output.sends += self._departures.begin(entry, command)
        elif (leaving := self._departures.find(command.key)) is not None:
            self._departing(leaving, command)
        elif entry is not None:
            self._arriving(entry, command, now)

    def _arriving(self, entry: DecodeEntry, command: HandoffCommand, now: float) -> None:
        match command:
            case CommitAnnounced(at=at):
                entry.announced_at = at
                entry.commit_due = at + self._delays.expected_s(self._num_fresh(entry.sequence))
            case Committed():
                self._committed(entry, command, now)
            case HandoffEnded(error=error):
                self._handoff_ended(entry, error)
            case BlocksSafe():
                self._blocks_safe(entry)

    def _departing(self, entry: DecodeEntry, command: HandoffCommand) -> None:
        match command:
            case Granted():
                self.output.sends += self._departures.granted(entry, command)
            case Sent():
                self.output.sends += self._departures.stop(entry)
            case Delivered(report=report):
                self._departures.end(entry)
                if not entry.ending:
                    self._counters[MOVED] += 1
                    entry.sequence.stats.phases[Phase.TRANSFER] = [report.start, report.end]
                    event = SpanEvent(key=entry.sequence.key, spans=self._spans(entry))
                    self.output.events_for(entry.router_id).spans.append(event)
                self._leave(entry)
            case HandoffEnded(error=error, uncertain=uncertain):
                self._departures.end(entry)
                if uncertain and not entry.ending:
                    lost = error or HandoffFailed("a hand-off has no known owner").info()
                    self._fail(entry, lost, retriable=True)
                if uncertain or entry.ending:
                    self._leave(entry)
                elif entry.state is RequestState.SENDING:  # it goes on here
                    entry.move(RequestState.RUNNING)

    def _committed(self, entry: DecodeEntry, command: Committed, now: float) -> None:
        if entry.state is not RequestState.RECEIVING:
            return
        sequence = entry.sequence
        num_fresh = self._num_fresh(sequence)
        num_tokens = sequence.num_computed + num_fresh
        if entry.announced_at is not None:
            self._delays.add(num_fresh, now - entry.announced_at)
        sequence.resume_at(num_tokens)
        sequence.tables.received(num_tokens)
        self._cache.publish(sequence, num_fresh)
        sequence.scoring = False  # the sender has scored the prompt
        for token in command.tokens:
            sequence.append(token)
        sequence.stats.begin(Phase.DECODE_QUEUE, now)
        entry.committed_at = now
        entry.move(RequestState.RUNNING)
        if command.held is not None and command.tokens:
            event = PromptEvent(key=sequence.key, num_cached_tokens=command.held)
            self.output.events_for(entry.router_id).prompts.append(event)
            self._untold.append(entry)

    def _tell(self) -> None:
        """Send the first tokens that prefill has left to this worker."""
        for entry in self._untold:
            if entry.state is RequestState.RUNNING:
                self._emit_token(entry, entry.sequence.tokens[-1], None, None)
        self._untold.clear()

    def _num_fresh(self, sequence: Sequence) -> int:
        """Tokens whose KV comes with the hand-off."""
        return num_received(sequence, self._block_size) - sequence.num_computed

    def _handoff_ended(self, entry: DecodeEntry, error: ErrorInfo | None) -> None:
        if entry.state not in (RequestState.AWAITING_GRANT, RequestState.RECEIVING):
            return
        if error is not None:
            self._fail(entry, error, retriable=True)
        else:
            self._counters[RELEASED] += 1
        if entry.state is RequestState.RECEIVING:
            self._quarantine(entry)
        else:
            self._forget(entry)

    def _quarantine(self, entry: DecodeEntry) -> None:
        self._cache.quarantine(entry.sequence)
        entry.move(RequestState.ENDING)

    def _blocks_safe(self, entry: DecodeEntry) -> None:
        if entry.state is RequestState.ENDING:
            self._blocks.unquarantine(entry.sequence.drop_kv())
            self._forget(entry)

    # --- plan -----------------------------------------------------------------------------------

    def admit(self, now: float) -> None:
        """Allocate blocks to queued requests, unless a running one waits for blocks."""
        if self._short is None or self._short.state is not RequestState.RUNNING:
            self.output.reserves += self._admission.admit(self._entries.values(), now)

    def plan(self, now: float) -> StepBatch | None:
        """Decoding sequences first, then prompts, within the budgets of tokens and time."""
        self._tell()
        self._expire(now)
        self._constrain()
        self.admit(now)
        self._short = None
        self._rows = []
        budget = self._config.max_num_batched_tokens
        cut, since = False, now
        runnable = self._runnable(now)
        for number, (entry, num_runnable) in enumerate(runnable):
            if num_runnable > 1 and not cut:
                prompts = self._prompt_budget(runnable[number:], now, since)
                budget, cut = min(budget, prompts), True
            since = min(since, entry.committed_at)
            entry.committed_at = math.inf
            if budget == 0 or len(self._rows) == self._config.max_num_seqs:
                break
            if entry.state is RequestState.RUNNING:  # not preempted by an older one just now
                budget -= self._add_row(entry, num_runnable, budget, now)
        return self._inflight.launch(self._rows, now)

    def _prompt_budget(
        self, waiting: list[tuple[DecodeEntry, int]], now: float, since: float
    ) -> int:
        """Tokens of the prompts that wait for a step beside the decode rows so far, one of which
        has waited for its second token `since` then: until the step in flight has ended."""
        received = [e for e in self._entries.values() if e.state is RequestState.RECEIVING]
        start_s = max(0.0, self.remaining_s(now))
        return self._prompts.take(
            contexts=[row.entry.sequence.num_launched for row in self._rows],
            gaps_s=(row.entry.gap_s for row in self._rows),
            arriving=[(e.commit_due - now, e.gap_s) for e in received],
            waited_s=now - since + start_s if since < now else 0.0,
            waiting=waiting_work(waiting, now, start_s),
        )

    def _constrain(self) -> None:
        alive = [e.sequence for e in self._entries.values() if e.sequence.matcher and not e.ending]
        for key, error in constrain(alive):
            self._fail_and_abort(self._entries[key], error, retriable=False)

    def _runnable(self, now: float) -> list[tuple[DecodeEntry, int]]:
        """Decoding sequences first, so that prompt chunks never take their place, then those whose
        KV has to be computed again, by age. Then prompts."""
        running = (e for e in self._entries.values() if e.state is RequestState.RUNNING)
        counted = [(e, count) for e in running if (count := e.sequence.num_runnable)]
        decodes = [pair for pair in counted if pair[1] == 1]
        others = [pair for pair in counted if pair[1] > 1]
        streams = [pair for pair in others if pair[0].sequence.num_output]
        prompts = [pair for pair in others if not pair[0].sequence.num_output]
        if len(prompts) > 1:
            rate = self._prompts.per_second([e.sequence.num_launched for e, _ in decodes])
            order = self._prompt_order([entry for entry, _ in prompts], rate)
            prompts = [prompts[i] for i in order]
        return decodes + streams + prompts

    def _prompt_order(self, entries: list[DecodeEntry], rate: float) -> list[int]:
        """In which they are computed, at so many tokens per second (0: unknown)."""
        speed = rate or float(self._config.max_num_batched_tokens)
        overdue = self._now - self._config.starvation_s
        waiting = [
            entry.waiting_prompt(speed, self._now, starved=entry.sequence.arrival < overdue)
            for entry in entries
        ]
        return prompt_order(waiting, max(0.0, self.remaining_s(self._now)))

    def _add_row(self, entry: DecodeEntry, num_runnable: int, budget: int, now: float) -> int:
        """Plan a sequence's part of the step; its number of tokens, 0 when it has to wait."""
        sequence = entry.sequence
        names: list[bytes] = []
        if num_runnable > 1:
            if self._cache.catch_up(sequence):
                num_runnable = sequence.num_runnable
            names = self._cache.names_ahead(sequence, min(num_runnable, budget))
            if not self._inflight.claim(sequence, names):
                return 0
        num_tokens, samples = sequence.chunk(num_runnable, budget)
        start = sequence.num_launched
        in_last_block = num_tokens == 1 and start % self._block_size
        if not in_last_block and not self._make_room(entry, start + num_tokens):
            return 0
        decodes = num_runnable == 1 or entry.catches_up
        phase = Phase.DECODE if decodes else Phase.LOCAL_PREFILL
        phases = sequence.stats.phases
        if phase not in phases:
            if phases.keys().isdisjoint((Phase.DECODE, Phase.LOCAL_PREFILL)):
                sequence.stats.end(Phase.DECODE_QUEUE, now)
            sequence.stats.begin(phase, now)
        self._rows.append(Row(entry, num_tokens, samples, names))
        return num_tokens

    def _make_room(self, entry: DecodeEntry, num_positions: int) -> bool:
        """Extend its blocks to `num_positions`, preempting younger sequences when none are free.

        A victim in flight frees its blocks when it lands: until then `entry`, and others that find
        no block, sit out, as those blocks may be enough for all.
        """
        tables = entry.sequence.tables
        missing = tables.missing(num_positions)
        while missing > 0:
            fresh = self._blocks.allocate(missing)
            if fresh is not None:
                tables.extend(num_positions, fresh)
                break
            if kept := kept_in_vain(self._entries.values()):
                self._blocks.free(kept)
                continue
            if self._short is None and self._cache.frees_soon(missing):
                self._short = entry
            if self._short is not None:
                return False
            staying = (e for e in self._entries.values() if e.stays)
            victim = max(staying, key=lambda e: e.order, default=None)
            if victim is None:
                return False  # all others are on their way to other workers
            if victim is entry and entry.sequence.in_flight and self._blocks.has_windows:
                return False  # once its step has landed, KV behind the window is freed
            self._preempt(victim)
            if victim is entry:
                return False
            if victim.sequence.in_flight:
                self._short = entry
                return False
        return True

    def _preempt(self, entry: DecodeEntry) -> None:
        self.num_preemptions += 1
        entry.sequence.stats.num_preemptions += 1
        entry.move(RequestState.WAITING)
        self._rows = [row for row in self._rows if row.entry is not entry]
        self._stopped(entry)

    # --- results --------------------------------------------------------------------------------

    def _count(self, row: Row[DecodeEntry], now: float) -> None:
        if row.num_tokens > 1 or not row.samples:
            row.entry.sequence.stats.num_chunks += 1
            row.entry.sequence.stats.end(Phase.LOCAL_PREFILL, now)

    def _wants_tokens(self, entry: DecodeEntry) -> bool:
        return entry.state not in (RequestState.ENDING, RequestState.GONE)

    def _sampled(
        self, entry: DecodeEntry, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> None:
        sequence = entry.sequence
        sequence.stats.num_steps += 1
        if sequence.stats.num_steps == 1 and sequence.submit.peer is None:
            self.output.events_for(entry.router_id).prompts.append(sequence.prompt_event)
        finish = sequence.append(token)
        sequence.stats.begin(Phase.DECODE, now)
        sequence.stats.end(Phase.DECODE, now)
        self._emit_token(entry, token, logprobs, finish)

    def _stopped(self, entry: DecodeEntry) -> None:
        if entry.departure is not None:
            self.output.sends += self._departures.landed(entry)
            return
        entry.num_blocks = self._admission.num_needed(entry.sequence, computes=True)
        self._release(entry)

    # --- ends -----------------------------------------------------------------------------------

    def _abort(self, entry: DecodeEntry, *, released: bool, error: ErrorInfo | None) -> None:
        if entry.departure is not None:  # its blocks are held until no read is in flight
            entry.move(RequestState.ENDING)
            self.output.sends.append(
                EndHandoff(key=entry.departure.key, released=released, error=error)
            )
            return
        if entry.state in (RequestState.AWAITING_GRANT, RequestState.RECEIVING):
            self.output.ends.append(
                EndHandoff(key=entry.sequence.key, released=released, error=error)
            )
        if entry.state is RequestState.RECEIVING:
            self._quarantine(entry)
            return
        self._leave(entry)

    def _complete(self, entry: DecodeEntry) -> None:
        if entry.departure is not None:
            self._abort(entry, released=True, error=None)
        else:
            self._forget(entry)

    def _leave(self, entry: DecodeEntry) -> None:
        self._forget(entry)
        self._release(entry)

    def _forget(self, entry: DecodeEntry) -> None:
        entry.move(RequestState.GONE)
        del self._entries[entry.sequence.key]

    # --- views ----------------------------------------------------------------------------------

    def _expected(self) -> Iterator[tuple[DecodeEntry, int, float]]:
        starts_at = max(self._now, self._inflight.free_at)
        rate, order = self._prompts.per_second, self._prompt_order
        return expected(self._entries.values(), starts_at, rate=rate, order=order)

    def load(self) -> WorkerLoad:
        running = num_tokens = 0
        queued, contexts = [], []
        for entry in self._entries.values():  # one pass: thousands may wait, and steps are short
            if entry.state in QUEUED:
                queued.append(entry)
            elif entry.state in ADMITTED:
                running += 1
            computed_here = entry.state in (RequestState.WAITING, RequestState.RUNNING)
            if computed_here:
                if (left := entry.sequence.num_uncomputed) > 1:
                    num_tokens += left
                else:
                    contexts.append(entry.sequence.num_launched)
        return WorkerLoad(
            running=running,
            waiting=len(queued),
            waiting_tokens=num_tokens,
            free_blocks=self._admission.num_free_for_new(queued),
            total_blocks=self._blocks.num_blocks,
            tokens_per_second=self._inflight.tokens_per_second(),
            prompt_tokens_per_second=self._prompts.per_second(contexts),
            decode_step_s=self._inflight.decode_step_s(),
            held_blocks=self._blocks.num_held,
            cached_blocks=self._blocks.num_cached,
            quarantined_blocks=self._blocks.num_quarantined,
            queued_blocks=sum(entry.num_blocks for entry in queued),
            prompts=self._queued_prompts() if num_tokens else (),
            free_at=self._inflight.free_at,
        )

    def next_deadline(self) -> float:
        """The earliest deadline of all requests, or when admission must run again."""
        return min(super().next_deadline(), self._admission.next_check)

    def counters(self) -> dict[str, int]:
        return {**super().counters(), PREEMPTIONS: self.num_preemptions}

    def _spans(self, entry: DecodeEntry) -> tuple[Span, ...]:
        num_blocks = self._admission.num_needed(entry.sequence, computes=False)
        return entry.spans(self._place, num_blocks)
