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

from collections.abc import Iterable

from decode_worker.admission import BlockAdmission
from decode_worker.lifecycle import (
    ADMITTED,
    COMPUTED_HERE,
    WAITING,
    BlocksSafe,
    Command,
    Committed,
    DecodeEntry,
    DecodeOutput,
    DecodeState,
)
from engine.batch import StepBatch, StepResult
from engine.kv.allocator import BlockAllocator
from grammar.matcher import compute_masks
from protocol.errors import ErrorInfo, InvalidRequest
from protocol.ids import RequestKey
from protocol.kv_layout import KVFingerprint
from protocol.logprobs import TokenLogprobs
from protocol.messages import WorkerLoad
from protocol.timeline import Phase, Span
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.inflight_steps import Row
from worker_runtime.scheduling.messages import PREEMPTIONS, EndHandoff, HandoffEnded
from worker_runtime.scheduling.scheduler import Scheduler
from worker_runtime.scheduling.sequence import Sequence


class DecodeScheduler(Scheduler[DecodeEntry, Command, DecodeOutput]):
    """Decides what a decode worker does next."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        blocks: BlockAllocator,
        fingerprint: KVFingerprint,
        place: str,
    ) -> None:
        super().__init__(config=config, blocks=blocks, fingerprint=fingerprint, place=place)
        self._admission = BlockAdmission(config, blocks, self._cache)
        self._rows: list[Row[DecodeEntry]] = []
        self._short: DecodeEntry | None = None
        self.num_preemptions = 0

    # --- commands -------------------------------------------------------------------------------

    def new_output(self) -> DecodeOutput:
        """An empty output for the next turn."""
        return DecodeOutput()

    def _enter(self, sequence: Sequence, order: int) -> DecodeEntry:
        remote = sequence.submit.peer is not None
        state = DecodeState.WAITING_ROOM if remote else DecodeState.WAITING
        return DecodeEntry(sequence, order, state, self._admission.needed(sequence))

    def _handoff(self, command: Command, now: float, out: DecodeOutput) -> None:
        match command:
            case Committed(key=key, first_token=token):
                self._committed(key, token, now)
            case HandoffEnded(key=key, error=error):
                self._handoff_ended(key, error, out)
            case BlocksSafe(key=key):
                self._blocks_safe(key)

    def _committed(self, key: RequestKey, first_token: int, now: float) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.state is not DecodeState.ARRIVING:
            return
        sequence = entry.sequence
        sequence.num_computed = len(sequence.tokens)
        self._cache.keep(sequence)
        sequence.scoring = False  # prefill has told of the prompt
        sequence.append(first_token)
        sequence.mark_start(Phase.DECODE_QUEUE, now)
        entry.state = DecodeState.RUNNING

    def _handoff_ended(self, key: RequestKey, error: ErrorInfo | None, out: DecodeOutput) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.state not in (DecodeState.WAITING_ROOM, DecodeState.ARRIVING):
            return
        if error is not None:
            self._fail(entry, error, retriable=True, out=out)
        else:
            self.num_released += 1
        if entry.state is DecodeState.ARRIVING:
            self._quarantine(entry)
        else:
            self._forget(entry)

    def _quarantine(self, entry: DecodeEntry) -> None:
        """Set aside what the hand-off may still write to; it never does to blocks that were
        there."""
        sequence = entry.sequence
        num_shared = sequence.num_computed // self._block_size
        self._blocks.free(sequence.block_ids[:num_shared])
        sequence.block_ids = sequence.block_ids[num_shared:]
        self._blocks.quarantine(sequence.block_ids)
        entry.state = DecodeState.ENDING

    def _blocks_safe(self, key: RequestKey) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.state is DecodeState.ENDING:
            self._blocks.unquarantine(entry.sequence.block_ids)
            entry.sequence.block_ids = []
            self._forget(entry)

    # --- plan -----------------------------------------------------------------------------------

    def admit(self, now: float, out: DecodeOutput) -> None:
        """Give blocks to those who wait, unless an older one in want of them runs."""
        if self._short is None or self._short.state is not DecodeState.RUNNING:
            out.reserves += self._admission.admit(self._entries.values(), now)

    def plan(self, now: float, out: DecodeOutput) -> StepBatch | None:
        """Decoding sequences first, then prompts, as far as the token budget goes."""
        self._expire(now, out)
        self._constrain(out)
        self.admit(now, out)
        self._short = None
        self._rows = []
        budget = self._config.max_num_batched_tokens
        for entry, num_runnable in self._runnable():
            if budget == 0 or len(self._rows) == self._config.max_num_seqs:
                break
            if entry.state is DecodeState.RUNNING:  # an older one may have preempted it just now
                budget -= self._take(entry, num_runnable, budget, now)
        return self._flight.launch(self._rows, now)

    def _constrain(self, out: DecodeOutput) -> None:
        """Masks for the sequences that have a new token; one whose grammar gives up fails."""
        constrained = [
            e.sequence for e in self._entries.values() if e.sequence.matcher and not e.ending
        ]
        for key, error in constrain(constrained):
            self._fail(self._entries[key], error, retriable=False, out=out)
            self._leave(self._entries[key], out, released=False, error=error)

    def _runnable(self) -> list[tuple[DecodeEntry, int]]:
        """Decoding sequences first, so that a prompt's chunk never takes their place; then by
        age."""
        running = (e for e in self._entries.values() if e.state is DecodeState.RUNNING)
        counted = [(e, count) for e in running if (count := e.sequence.num_runnable)]
        return sorted(counted, key=lambda pair: (pair[1] > 1, pair[0].order))

    def _take(self, entry: DecodeEntry, num_runnable: int, budget: int, now: float) -> int:
        sequence = entry.sequence
        names: list[bytes] = []
        if num_runnable > 1:
            if self._cache.catch_up(sequence):
                num_runnable = sequence.num_runnable
            names = self._cache.names_ahead(sequence, min(num_runnable, budget))
            if not self._flight.claim(sequence, names):
                return 0
        num_tokens, samples = sequence.part(num_runnable, budget)
        start = sequence.num_computed + sequence.num_in_flight
        if not self._make_room(entry, start + num_tokens):
            return 0
        if sequence.index is None:
            sequence.mark_end(Phase.DECODE_QUEUE, now)
        sequence.mark_start(Phase.DECODE if num_runnable == 1 else Phase.LOCAL_PREFILL, now)
        self._rows.append(Row(entry, num_tokens, samples, names))
        return num_tokens

    def _make_room(self, entry: DecodeEntry, num_positions: int) -> bool:
        """Give `entry` blocks for its next positions, preempting younger sequences if there are
        none; a victim in flight gives its blocks when it has landed, so `entry` sits this step out,
        and so do others that find none: they may be enough for all."""
        held = entry.sequence.block_ids
        missing = -(-num_positions // self._block_size) - len(held)
        while missing > 0:
            fresh = self._blocks.allocate(missing)
            if fresh is not None:
                held.extend(fresh)
                break
            if self._short is not None:
                return False
            victim = self._youngest_running()
            self._preempt(victim)
            if victim is entry:
                return False
            if victim.sequence.num_in_flight:
                self._short = entry
                return False
        return True

    def _youngest_running(self) -> DecodeEntry:
        running = (e for e in self._entries.values() if e.state is DecodeState.RUNNING)
        return max(running, key=lambda e: e.order)

    def _preempt(self, entry: DecodeEntry) -> None:
        self.num_preemptions += 1
        entry.sequence.num_preemptions += 1
        entry.state = DecodeState.WAITING
        self._rows = [row for row in self._rows if row.entry is not entry]
        self._settle(entry)

    def _settle(self, entry: DecodeEntry) -> None:
        """Take the blocks of a sequence that runs no more, unless a step in flight writes to
        them."""
        sequence = entry.sequence
        entry.needed = self._admission.needed(sequence)
        if sequence.num_in_flight == 0:
            self._blocks.free(sequence.drop_kv())

    def launched(self, step: int, out: DecodeOutput) -> None:
        """Nothing of a step leaves this worker before it has landed."""

    # --- apply ----------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float, out: DecodeOutput) -> None:
        """Take the tokens of the oldest step in flight in; finished sequences leave and free their
        blocks."""
        rows = self._flight.land(now)
        for index, (row, token) in enumerate(zip(rows, result.tokens, strict=True)):
            entry = row.entry
            if row.num_tokens > 1 or not row.samples:
                entry.sequence.num_chunks += 1
                entry.sequence.mark_end(Phase.LOCAL_PREFILL, now)
            if entry.state is not DecodeState.GONE:
                self._cache.keep(entry.sequence)
                if entry.sequence.scoring:
                    self._scored(row, result.target_logprobs.get(index, ()), out)
                if token is not None:
                    self._sampled(entry, token, result.logprobs.get(index), now, out)
            if entry.state is not DecodeState.RUNNING:
                self._settle(entry)

    def _sampled(
        self,
        entry: DecodeEntry,
        token: int,
        logprobs: TokenLogprobs | None,
        now: float,
        out: DecodeOutput,
    ) -> None:
        sequence = entry.sequence
        sequence.num_steps += 1
        if sequence.num_steps == 1 and sequence.submit.peer is None:
            out.of(entry.router_id).prompts.append(sequence.prompt_event)
        finish = sequence.append(token)
        sequence.mark_start(Phase.DECODE, now)
        sequence.mark_end(Phase.DECODE, now)
        self._tell(entry, token, logprobs, finish, out)

    # --- ends -----------------------------------------------------------------------------------

    def _leave(
        self, entry: DecodeEntry, out: DecodeOutput, *, released: bool, error: ErrorInfo | None
    ) -> None:
        """Forget a sequence that did not finish; blocks that may be written to go into
        quarantine."""
        sequence = entry.sequence
        if entry.state in (DecodeState.WAITING_ROOM, DecodeState.ARRIVING):
            out.ends.append(EndHandoff(key=sequence.key, released=released, error=error))
        if entry.state is DecodeState.ARRIVING:
            self._quarantine(entry)
            return
        self._forget(entry)
        self._settle(entry)

    def _finished(self, entry: DecodeEntry, out: DecodeOutput) -> None:
        self._forget(entry)

    def _forget(self, entry: DecodeEntry) -> None:
        entry.state = DecodeState.GONE
        del self._entries[entry.sequence.key]

    # --- views ----------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """Figures for the routers."""
        running = waiting = tokens = promised = 0
        for entry in self._entries.values():  # one pass: thousands may wait, and steps are short
            if entry.state in WAITING:
                waiting += 1
                promised += entry.needed
            elif entry.state in ADMITTED:
                running += 1
            if entry.state in COMPUTED_HERE and (left := entry.sequence.num_uncomputed) > 1:
                tokens += left
        return WorkerLoad(
            running=running,
            waiting=waiting,
            waiting_tokens=tokens,
            free_blocks=self._admission.credits(promised),
            total_blocks=self._blocks.num_blocks,
            tokens_per_second=self._flight.tokens_per_second(),
            held_blocks=self._blocks.num_held,
            cached_blocks=self._blocks.num_cached,
            quarantined_blocks=self._blocks.num_quarantined,
            num_commands=self._num_commands,
        )

    def next_deadline(self) -> float | None:
        """The earliest deadline among all requests, or when admission has to be looked at again."""
        times = (super().next_deadline(), self._admission.look_at)
        return min((at for at in times if at is not None), default=None)

    def counters(self) -> dict[str, int]:
        """How requests ended here, since the start."""
        return {**super().counters(), PREEMPTIONS: self.num_preemptions}

    def _spans(self, entry: DecodeEntry) -> tuple[Span, ...]:
        sequence = entry.sequence
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
                Phase.CREDIT_WAIT: {
                    "blocks": self._admission.needed(sequence),
                    "cached_tokens": sequence.num_cached_tokens,
                },
            },
        )


def constrain(sequences: Iterable[Sequence]) -> list[tuple[RequestKey, ErrorInfo]]:
    """Compute the masks of sequences whose output has grown; those whose grammar cannot go on."""
    constrained = [(s.key, s.matcher) for s in sequences if s.matcher is not None]
    compute_masks(matcher for _, matcher in constrained)
    return [
        (key, InvalidRequest(f"grammar: {matcher.error}", param="grammar").info())
        for key, matcher in constrained
        if matcher.error
    ]
