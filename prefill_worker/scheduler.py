"""Chunked prefill under a token budget. Pure: commands and a clock in, a batch and output out.

A step may be planned while the one before it runs: the next chunk of a prompt follows the one in
flight. Blocks are pushed when the step that completes them is launched, and leave behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from engine.batch import StepBatch
from prefill_worker.expected import expected
from prefill_worker.lifecycle import PrefillEntry
from protocol.errors import ErrorInfo
from protocol.messages import SpanEvent, WorkerLoad, size_class
from protocol.sampling import TokenLogprobs
from protocol.timeline import Phase, Span
from worker_runtime.scheduling.entry import RequestState
from worker_runtime.scheduling.inflight_steps import Row
from worker_runtime.scheduling.messages import (
    FINISHED,
    HELD,
    RELEASED,
    AnnounceCommit,
    CommitHandoff,
    Delivered,
    EndHandoff,
    Granted,
    HandoffCommand,
    HandoffEnded,
    Push,
)
from worker_runtime.scheduling.prompt_order import prompt_order
from worker_runtime.scheduling.scheduler import Scheduler, SchedulerParts
from worker_runtime.scheduling.sequence import Sequence

#: Prompt tokens of a step while sequences decode on the same engine: their gaps stay short.
_SHARED_CHUNK = 256
#: Share of the time to a promised first token after which it is sent at once.
_HELD_SHARE = 0.85


class PrefillScheduler(Scheduler[PrefillEntry]):
    """Decides what a prefill worker does next."""

    def __init__(self, **parts: Unpack[SchedulerParts]) -> None:
        super().__init__(**parts)
        self.max_chunk = (
            2 * self._config.max_num_batched_tokens
        )  # a chunk in flight and the next one
        #: Tokens that a step is filled to.
        self._fill = self._config.fill_tokens or self._config.max_num_batched_tokens
        self._counters[HELD] = 0
        self._num_reserved = 0  # blocks that running prompts may hold together, with KV windows

    def _new_entry(self, sequence: Sequence, order: int) -> PrefillEntry:
        num_cached = self._cache.num_cached(sequence)
        if sequence.source is not None:
            num_cached = max(num_cached, min(sequence.source.num_tokens, len(sequence.tokens) - 1))
        return PrefillEntry(sequence, order, RequestState.AWAITING_GRANT, num_cached)

    # --- hand-off -------------------------------------------------------------------------------

    def _handle_handoff(self, command: HandoffCommand, now: float) -> None:
        entry = self._entries.get(command.key)
        if entry is None:
            return
        match command:
            case Granted():
                self._granted(entry, command.num_cached_tokens, now)
            case Delivered():
                self._delivered(entry, command)
            case HandoffEnded(error=error):
                self._handoff_ended(entry, error)

    def _granted(self, entry: PrefillEntry, num_cached_tokens: int, now: float) -> None:
        if entry.state is not RequestState.AWAITING_GRANT:
            return
        entry.move(RequestState.GRANTED)
        entry.num_pushed = num_cached_tokens // self._block_size
        entry.progress_at = now
        entry.sequence.stats.end(Phase.CREDIT_WAIT, now)
        entry.sequence.stats.begin(Phase.PREFILL_QUEUE, now)

    def _delivered(self, entry: PrefillEntry, command: Delivered) -> None:
        if entry.state not in (RequestState.SENDING, RequestState.ENDING):
            return
        if entry.state is RequestState.SENDING:
            self._counters[FINISHED] += 1
            report = entry.report = command.report
            entry.sequence.stats.phases[Phase.TRANSFER] = [report.start, report.end]
            event = SpanEvent(key=command.key, spans=self._spans(entry))
            self.output.events_for(entry.router_id).spans.append(event)
        self._forget(entry)

    def _handoff_ended(self, entry: PrefillEntry, error: ErrorInfo | None) -> None:
        if not entry.ending:
            if error is not None:
                self._fail(entry, error, retriable=True)
            else:
                self._counters[RELEASED] += 1
        self._forget(entry)

    # --- plan -----------------------------------------------------------------------------------

    def plan(self, now: float) -> StepBatch | None:
        """Prompts, and chunks of those that are too long for a step. A prompt that has waited
        `starvation_s` and finds no room keeps younger ones from starting before it."""
        self._expire(now)
        rows: list[Row[PrefillEntry]] = []
        may_start, used = True, 0
        fill = min(self._fill, _SHARED_CHUNK) if self.shares_steps else self._fill
        for entry in self._runnable(now):
            if used >= fill or len(rows) == self._config.max_num_seqs:
                break
            budget = self._budget(entry, used, fill)
            if not budget:
                continue
            if entry.state is RequestState.GRANTED and not (may_start and self._start(entry, now)):
                may_start = may_start and not self._reserves_room(entry, now)
                continue
            row = self._plan_chunk(entry, budget, now)
            if row is not None:
                entry.progress_at = now
                rows.append(row)
                used += row.num_tokens
        # Only full steps tell the rate: a few tokens alone take as long as many.
        full = 2 * used >= fill or len(rows) == self._config.max_num_seqs
        return self._inflight.launch(rows, now, timed=full)

    def _budget(self, entry: PrefillEntry, used: int, fill: int) -> int:
        """Tokens that a prompt may have in a step of `used` that is filled to `fill`. A prompt that
        some step can hold whole is not cut, since a chunk attends slower to tokens of an earlier
        step than to its own: it makes a step longer that is less than half full, or waits. One that
        is scored is cut in any case."""
        sequence, most, room = entry.sequence, self._config.max_num_batched_tokens, fill - used
        left = min(sequence.num_runnable, sequence.num_uncomputed - entry.num_cached)
        cuts = self.shares_steps or self._fill == most or sequence.scoring
        if cuts or left <= room or left > most:
            return room
        return most - used if 2 * used < fill and left <= most - used else 0

    def _runnable(self, now: float) -> list[PrefillEntry]:
        """Prompts of which something can be computed, in the order in which that is done."""
        states = (RequestState.GRANTED, RequestState.RUNNING)
        started = (e for e in self._entries.values() if e.state in states)
        entries = [e for e in started if not e.sequence.num_pending and e.sequence.num_runnable]
        if len(entries) < 2:
            return entries
        speed = self._inflight.tokens_per_second() or float(self._fill)
        waiting = [
            e.waiting_prompt(speed, now, starved=self._is_overdue(e, now), num_cached=e.num_cached)
            for e in entries
        ]
        return [entries[i] for i in prompt_order(waiting, max(0.0, self.remaining_s(now)))]

    def _is_overdue(self, entry: PrefillEntry, now: float) -> bool:
        return now - entry.progress_at > self._config.starvation_s

    def _reserves_room(self, entry: PrefillEntry, now: float) -> bool:
        """Whether younger prompts wait for this one: it is overdue, and requests that hold blocks
        will free them. Otherwise it would hold them all up for nothing."""
        if not self._is_overdue(entry, now):
            return False
        usable = self._blocks.num_blocks - self._blocks.num_quarantined
        fits = self._num_needed(entry.sequence) <= usable
        return fits and any(e.sequence.tables for e in self._entries.values())

    def _start(self, entry: PrefillEntry, now: float) -> bool:
        """Allocate blocks for the whole prompt and push the cached ones; False without room.

        KV groups with a window get blocks for one chunk, and later chunks allocate as earlier ones
        leave the window: all that the running prompts may hold together fits the pool.
        """
        sequence = entry.sequence
        if self._brings(sequence, now):
            return False
        if self._blocks.has_windows:
            num_needed = self._num_needed(sequence)
            if self._num_reserved + num_needed > self._blocks.num_blocks:
                return False
        chunk = self._config.max_num_batched_tokens
        if not self._cache.allocate(sequence, len(sequence.tokens), chunk=chunk, now=now):
            return False
        if self._blocks.has_windows:
            entry.num_reserved = num_needed
            self._num_reserved += num_needed
        entry.move(RequestState.RUNNING)
        entry.num_cached = 0
        self._push(entry, sequence.num_computed)
        return True

    def _num_needed(self, sequence: Sequence) -> int:
        """The most blocks that a prompt holds at a time."""
        return self._blocks.pages_for(len(sequence.tokens), self.max_chunk)

    def _plan_chunk(self, entry: PrefillEntry, budget: int, now: float) -> Row[PrefillEntry] | None:
        """The next chunk of a prompt; None while another sequence computes the same blocks, or a
        lower tier brings them."""
        sequence, stats = entry.sequence, entry.sequence.stats
        if sequence.loading is not None:
            return None
        self._cache.catch_up(sequence)
        if not sequence.in_flight:  # nothing new but for what another sequence or a tier brought
            self._push(entry, sequence.num_computed)
        num_tokens, samples = sequence.chunk(sequence.num_runnable, budget)
        names = self._cache.names_ahead(sequence, num_tokens)
        if not self._inflight.claim(sequence, names):
            return None
        if self._blocks.has_windows:
            end = sequence.num_launched + num_tokens
            fresh = self._blocks.allocate(sequence.tables.missing(end))
            if fresh is None:  # sequences that decode here have them for now
                return None
            sequence.tables.extend(end, fresh)
        if Phase.PREFILL not in stats.phases:
            stats.end(Phase.PREFILL_QUEUE, now)
            stats.begin(Phase.PREFILL, now)
        return Row(entry, num_tokens, samples, names)

    def launched(self, step: int) -> None:
        """Push the blocks that the launched step completes."""
        for row in self._inflight.newest:
            if row.entry.state is not RequestState.RUNNING:  # the step before it has just failed it
                continue
            num_tokens = row.entry.sequence.num_launched
            self._push(row.entry, num_tokens, last=row.samples, after=step)
            sequence, at = row.entry.sequence, self._inflight.ends_at
            if row.samples and at is not None and not sequence.ends_next:
                self.output.sends.append(AnnounceCommit(key=sequence.key, at=at))

    def _push(
        self, entry: PrefillEntry, num_tokens: int, *, last: bool = False, after: int = 0
    ) -> None:
        """Send the blocks that `num_tokens` tokens fill, and with the `last` of them the block that
        stays half full; none if the request surely ends here."""
        sequence = entry.sequence
        if sequence.ends_next:
            return
        ready = -(-num_tokens // self._block_size) if last else num_tokens // self._block_size
        if ready <= entry.num_pushed:
            return
        tables, num_known = sequence.tables, len(sequence.tokens)
        for group in range(len(tables.groups)):
            first = max(entry.num_pushed, tables.first_seen(group, num_known))
            if first < ready:
                ids = tables.part(group, first, ready)
                push = Push(
                    key=sequence.key, group=group, block_ids=ids, first_block=first, after=after
                )
                self.output.sends.append(push)
        entry.num_pushed = ready

    # --- results --------------------------------------------------------------------------------

    def _count(self, row: Row[PrefillEntry], now: float) -> None:
        row.entry.sequence.stats.num_chunks += 1

    def _wants_tokens(self, entry: PrefillEntry) -> bool:
        return entry.state is RequestState.RUNNING

    def _sampled(
        self, entry: PrefillEntry, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> None:
        sequence = entry.sequence
        finish = sequence.append(token)
        sequence.stats.end(Phase.PREFILL, now)
        event, held = sequence.prompt_event, None
        self.output.events_for(entry.router_id).prompts.append(event)
        if finish is None and self._holds(sequence, now):
            held = event.num_cached_tokens
            self._counters[HELD] += 1
        else:
            self._emit_token(entry, token, logprobs, finish)
        if finish is None:
            entry.move(RequestState.SENDING)
            self.output.sends.append(CommitHandoff(key=sequence.key, tokens=(token,), held=held))

    def _holds(self, sequence: Sequence, at: float) -> bool:
        """Whether a token that is known at that time is left to decode to send: the first of an
        output, without log-probabilities of it or the prompt, that will be in time even so."""
        submit, within_s = sequence.submit, self._config.hold_first_s
        if submit.first_s is not None:
            within_s = min(within_s, _HELD_SHARE * submit.first_s)
        scores = sequence.sampling.logprobs, sequence.sampling.prompt_logprobs
        return scores == (None, None) and not submit.output_ids and at - sequence.arrival < within_s

    def _stopped(self, entry: PrefillEntry) -> None:
        if entry.state is RequestState.GONE:
            self._release(entry)

    # --- ends -----------------------------------------------------------------------------------

    def _abort(self, entry: PrefillEntry, *, released: bool, error: ErrorInfo | None) -> None:
        """Blocks stay held until the sender reports that no read is in flight."""
        entry.move(RequestState.ENDING)
        self.output.sends.append(EndHandoff(key=entry.sequence.key, released=released, error=error))

    def _complete(self, entry: PrefillEntry) -> None:
        self._abort(entry, released=True, error=None)

    def _release(self, entry: PrefillEntry) -> None:
        super()._release(entry)
        if not entry.sequence.in_flight:
            self._num_reserved -= entry.num_reserved
            entry.num_reserved = 0

    def _forget(self, entry: PrefillEntry) -> None:
        entry.move(RequestState.GONE)
        del self._entries[entry.sequence.key]
        self._release(entry)

    # --- views ----------------------------------------------------------------------------------

    def _expected(self) -> Iterator[tuple[PrefillEntry, int, float]]:
        return expected(
            self._runnable(self._now),
            max(self._now, self._inflight.free_at),
            self._inflight.model,
            max_tokens=self._config.max_num_batched_tokens,
            room=lambda entry, used: self._budget(entry, used, self._fill),
        )

    def load(self) -> WorkerLoad:
        """Load figures for the routers; waiting_tokens / tokens_per_second is the backlog in
        seconds."""
        waiting = running = 0
        backlog: list[int] = []
        for entry in self._entries.values():
            queued = entry.state in entry.without_blocks
            waiting += queued
            running += entry.state in (RequestState.RUNNING, RequestState.SENDING)
            if queued or entry.state is RequestState.RUNNING:
                left = entry.sequence.num_uncomputed - entry.num_cached
                backlog += [0] * (size_class(left) + 1 - len(backlog))
                backlog[size_class(left)] += left
        return WorkerLoad(
            running=running,
            waiting=waiting,
            waiting_tokens=sum(backlog),
            backlog=tuple(backlog),
            free_blocks=self._blocks.num_available,
            total_blocks=self._blocks.num_blocks,
            tokens_per_second=self._inflight.tokens_per_second(),
            held_blocks=self._blocks.num_held,
            cached_blocks=self._blocks.num_cached,
            quarantined_blocks=self._blocks.num_quarantined,
            prompts=self._queued_prompts() if waiting or running else (),
            free_at=self._inflight.free_at,
        )

    def _spans(self, entry: PrefillEntry) -> tuple[Span, ...]:
        sequence, report = entry.sequence, entry.report
        return sequence.stats.spans(
            self._place,
            {
                Phase.PREFILL: {
                    "tokens": sequence.num_computed,
                    "chunks": sequence.stats.num_chunks,
                    "cached_tokens": sequence.stats.num_cached_tokens,
                },
                Phase.TRANSFER: {
                    "bytes": report.num_bytes if report else 0,
                    "pieces": report.num_pieces if report else 0,
                },
            },
        )
