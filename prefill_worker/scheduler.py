"""Chunked prefill under a token budget. Pure: commands and a clock in, a batch and an output out.

Life of a sequence here (blocks held in parentheses):

    EXPECTING (none) -> GRANTED (none) -> RUNNING (held, in chunks) -> SENDING (held) -> gone
    any of them -> ENDING (held) when cancelled or failed: freed once no read is in flight

Nothing is held before decode has granted room, so a full decode pool never pins memory here.

A step may be planned while the one before it runs: the next chunk of a prompt follows the one in
flight. Blocks are pushed as soon as the step that completes them is launched, and leave behind it;
those of a sequence that is gone are freed once no step in flight writes to them.
"""

from __future__ import annotations

from engine.batch import StepBatch, StepResult
from prefill_worker.lifecycle import (
    Command,
    CommitHandoff,
    Delivered,
    Granted,
    PrefillEntry,
    PrefillOutput,
    PrefillState,
    Push,
)
from protocol.errors import ErrorInfo
from protocol.ids import RequestKey
from protocol.logprobs import TokenLogprobs
from protocol.messages import SpanEvent, WorkerLoad, size_class
from protocol.timeline import Phase, Span
from worker_runtime.scheduling.inflight_steps import Row
from worker_runtime.scheduling.messages import EndHandoff, HandoffEnded
from worker_runtime.scheduling.scheduler import Scheduler
from worker_runtime.scheduling.sequence import Sequence


class PrefillScheduler(Scheduler[PrefillEntry, Command, PrefillOutput]):
    """Decides what a prefill worker does next."""

    # --- commands -------------------------------------------------------------------------------

    def new_output(self) -> PrefillOutput:
        """An empty output for the next turn."""
        return PrefillOutput()

    def _enter(self, sequence: Sequence, order: int) -> PrefillEntry:
        return PrefillEntry(sequence, order, PrefillState.EXPECTING, self._cache.found(sequence))

    def _handoff(self, command: Command, now: float, out: PrefillOutput) -> None:
        match command:
            case Granted():
                self._granted(command, now)
            case Delivered():
                self._delivered(command, out)
            case HandoffEnded(key=key, error=error):
                self._handoff_ended(key, error, out)

    def _granted(self, command: Granted, now: float) -> None:
        entry = self._entries.get(command.key)
        if entry is None or entry.state is not PrefillState.EXPECTING:
            return
        entry.state = PrefillState.GRANTED
        entry.pushed = command.num_cached_tokens // self._block_size
        entry.granted_at = entry.progress_at = now
        entry.sequence.mark_end(Phase.CREDIT_WAIT, now)
        entry.sequence.mark_start(Phase.PREFILL_QUEUE, now)

    def _delivered(self, command: Delivered, out: PrefillOutput) -> None:
        entry = self._entries.get(command.key)
        if entry is None or entry.state not in (PrefillState.SENDING, PrefillState.ENDING):
            return
        if entry.state is PrefillState.SENDING:
            self.num_finished += 1
            report = command.report
            entry.sequence.marks[Phase.TRANSFER] = [report.start, report.end]
            entry.num_bytes, entry.num_pieces = report.num_bytes, report.num_pieces
            out.of(entry.router_id).spans.append(
                SpanEvent(key=command.key, spans=self._spans(entry))
            )
        self._remove(entry)

    def _handoff_ended(self, key: RequestKey, error: ErrorInfo | None, out: PrefillOutput) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.state is not PrefillState.ENDING:
            if error is not None:
                self._fail(entry, error, retriable=True, out=out)
            else:
                self.num_released += 1
        self._remove(entry)

    # --- plan -----------------------------------------------------------------------------------

    def admit(self, now: float, out: PrefillOutput) -> None:
        """Prompts get blocks when they are planned: those with the least work first."""

    def plan(self, now: float, out: PrefillOutput) -> StepBatch | None:
        """Chunks of prompts, as far as the token budget goes. One that has waited too long and has
        no room gets what becomes free: younger ones do not start before it."""
        self._expire(now, out)
        rows: list[Row[PrefillEntry]] = []
        starts = True
        budget = self._config.max_num_batched_tokens
        for entry in sorted(self._runnable(), key=lambda e: self._rank(e, now)):
            if budget == 0 or len(rows) == self._config.max_num_seqs:
                break
            if entry.state is PrefillState.GRANTED and not (starts and self._start(entry, out)):
                starts = starts and not self._is_overdue(entry, now)
                continue
            row = self._chunk(entry, budget, now, out)
            if row is not None:
                entry.progress_at = now
                rows.append(row)
                budget -= row.num_tokens
        # How fast work in line gets done: a few tokens alone take as long as many.
        full = budget <= self._config.max_num_batched_tokens // 2
        full = full or len(rows) == self._config.max_num_seqs
        return self._flight.launch(rows, now, timed=full)

    def _rank(self, entry: PrefillEntry, now: float) -> tuple[bool, float, int]:
        """Smallest prompt first, so that a short one never sits behind a long one, begun or not;
        every second since the grant counts as a second less of work, so that none starves."""
        waited = now - entry.granted_at
        speed = self._flight.tokens_per_second() or float(self._config.max_num_batched_tokens)
        overdue = self._is_overdue(entry, now)
        sequence = entry.sequence
        work = len(sequence.tokens) - sequence.num_cached_tokens - entry.num_found
        return not overdue, -waited if overdue else work / speed - waited, entry.order

    def _is_overdue(self, entry: PrefillEntry, now: float) -> bool:
        return now - entry.progress_at > self._config.starvation_s

    def _start(self, entry: PrefillEntry, out: PrefillOutput) -> bool:
        """Take blocks for the whole prompt, or leave the sequence waiting. Those that are filled
        are pushed at once."""
        num_blocks = -(-len(entry.sequence.tokens) // self._block_size)
        if not self._cache.take(entry.sequence, num_blocks):
            return False
        entry.state = PrefillState.RUNNING
        entry.num_found = 0
        self._push(entry, entry.sequence.num_computed, out)
        return True

    def _chunk(
        self, entry: PrefillEntry, budget: int, now: float, out: PrefillOutput
    ) -> Row[PrefillEntry] | None:
        """The next part of a prompt; None while another sequence computes the same."""
        sequence = entry.sequence
        if self._cache.catch_up(sequence):
            self._push(entry, sequence.num_computed, out)
        num_tokens, samples = sequence.part(sequence.num_runnable, budget)
        names = self._cache.names_ahead(sequence, num_tokens)
        if not self._flight.claim(sequence, names):
            return None
        if sequence.index is None:
            sequence.mark_end(Phase.PREFILL_QUEUE, now)
            sequence.mark_start(Phase.PREFILL, now)
        return Row(entry, num_tokens, samples, names)

    def launched(self, step: int, out: PrefillOutput) -> None:
        """The planned step runs: push the blocks that it completes."""
        for row in self._flight.newest:
            sequence = row.entry.sequence
            there = sequence.num_computed + sequence.num_in_flight
            self._push(row.entry, there, out, last=row.samples, after=step)

    # --- apply ----------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float, out: PrefillOutput) -> None:
        """Take the oldest step in flight in: token 1 of prompts that are done."""
        rows = self._flight.land(now)
        for index, (row, token) in enumerate(zip(rows, result.tokens, strict=True)):
            entry = row.entry
            entry.sequence.num_chunks += 1
            if entry.state is PrefillState.GONE:
                self._settle(entry)
            else:
                self._cache.keep(entry.sequence)
            if entry.state is not PrefillState.RUNNING:
                continue
            if entry.sequence.scoring:
                self._scored(row, result.target_logprobs.get(index, ()), out)
            if token is not None:
                self._sampled(entry, token, result.logprobs.get(index), now, out)

    def _push(
        self,
        entry: PrefillEntry,
        num_tokens: int,
        out: PrefillOutput,
        *,
        last: bool = False,
        after: int = 0,
    ) -> None:
        """Send the blocks that are complete with `num_tokens` of the sequence, and with the `last`
        of them the block that stays half full; none if the request is known to end here."""
        sequence = entry.sequence
        if sequence.ends_next:
            return
        ready = -(-num_tokens // self._block_size) if last else num_tokens // self._block_size
        if ready > entry.pushed:
            out.handoffs.append(
                Push(
                    key=sequence.key,
                    block_ids=tuple(sequence.block_ids[entry.pushed : ready]),
                    first_block=entry.pushed,
                    after=after,
                )
            )
            entry.pushed = ready

    def _sampled(
        self,
        entry: PrefillEntry,
        token: int,
        logprobs: TokenLogprobs | None,
        now: float,
        out: PrefillOutput,
    ) -> None:
        sequence = entry.sequence
        finish = sequence.append(token)
        sequence.mark_end(Phase.PREFILL, now)
        out.of(entry.router_id).prompts.append(sequence.prompt_event)
        self._tell(entry, token, logprobs, finish, out)
        if finish is None:
            entry.state = PrefillState.SENDING
            out.handoffs.append(CommitHandoff(key=sequence.key, first_token=token))

    # --- ends -----------------------------------------------------------------------------------

    def _leave(
        self, entry: PrefillEntry, out: PrefillOutput, *, released: bool, error: ErrorInfo | None
    ) -> None:
        """Blocks stay held until the sender says that no read is in flight."""
        entry.state = PrefillState.ENDING
        out.handoffs.append(EndHandoff(key=entry.sequence.key, released=released, error=error))

    def _finished(self, entry: PrefillEntry, out: PrefillOutput) -> None:
        self._leave(entry, out, released=True, error=None)

    def _remove(self, entry: PrefillEntry) -> None:
        entry.state = PrefillState.GONE
        del self._entries[entry.sequence.key]
        self._settle(entry)

    def _settle(self, entry: PrefillEntry) -> None:
        """Take the blocks of a sequence that is gone, unless a step in flight writes to them."""
        sequence = entry.sequence
        if sequence.num_in_flight == 0:
            self._blocks.free(sequence.block_ids)
            sequence.block_ids = []

    # --- views ----------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """Figures for the routers; `waiting_tokens` over `tokens_per_second` is the backlog in
        seconds."""
        working = (PrefillState.EXPECTING, PrefillState.GRANTED, PrefillState.RUNNING)
        backlog: list[int] = []
        for entry in self._entries.values():
            if entry.state in working:
                left = entry.sequence.num_uncomputed - entry.num_found
                backlog += [0] * (size_class(left) + 1 - len(backlog))
                backlog[size_class(left)] += left
        return WorkerLoad(
            running=self._count(PrefillState.RUNNING, PrefillState.SENDING),
            waiting=self._count(PrefillState.EXPECTING, PrefillState.GRANTED),
            waiting_tokens=sum(backlog),
            backlog=tuple(backlog),
            free_blocks=self._blocks.num_available,
            total_blocks=self._blocks.num_blocks,
            tokens_per_second=self._flight.tokens_per_second(),
            held_blocks=self._blocks.num_held,
            cached_blocks=self._blocks.num_cached,
            quarantined_blocks=self._blocks.num_quarantined,
            num_commands=self._num_commands,
        )

    def _runnable(self) -> list[PrefillEntry]:
        """Prompts with chunks to launch: not those whose token 1 is being sampled, or whose end is
        in flight because they are only scored."""
        running = (
            e
            for e in self._entries.values()
            if e.state in (PrefillState.GRANTED, PrefillState.RUNNING)
        )
        return [e for e in running if not e.sequence.num_pending and e.sequence.num_runnable]

    def _count(self, *states: PrefillState) -> int:
        return sum(e.state in states for e in self._entries.values())

    def _spans(self, entry: PrefillEntry) -> tuple[Span, ...]:
        sequence = entry.sequence
        return sequence.spans(
            self._place,
            {
                Phase.PREFILL: {
                    "tokens": sequence.num_computed,
                    "chunks": sequence.num_chunks,
                    "cached_tokens": sequence.num_cached_tokens,
                },
                Phase.TRANSFER: {"bytes": entry.num_bytes, "pieces": entry.num_pieces},
            },
        )
