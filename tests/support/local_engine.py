"""An engine in one process: oracle of the tests and colocated baseline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from engine.batch import SequenceStep, StepBatch, TokenHistory
from engine.config import EngineConfig
from engine.executor import Executor, build_executor
from engine.kv.allocator import BlockAllocator
from engine.kv.tables import BlockTables
from protocol.errors import ContextTooLong, Internal, InvalidRequest
from protocol.sampling import SamplingParams
from tests.support.invariants import check_blocks

#: Output ids so far to the allowed ids, packed as in engine.kernels.sampling.
MaskOf = Callable[[Sequence[int]], bytes]


class _LocalSequence:
    """One request. KV of `computed` tokens of prompt + output exists."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        mask_of: MaskOf | None,
        tables: BlockTables,
    ) -> None:
        self.tokens = list(prompt)
        self.mask_of = mask_of
        self.num_prompt = len(prompt)
        self.sampling = sampling
        self.history = TokenHistory(prompt, (), sampling) if sampling.penalised else None
        self.computed = 0
        self.tables = tables
        self.finished = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)
        count = len(self.tokens) - self.num_prompt
        ended = self.sampling.ends_with(token, count)
        self.finished = ended or count >= self.sampling.max_tokens


class LocalEngine:
    """Runs requests to their end with continuous batching, chunked prefill and preemption.

    A step takes one token of each decoding sequence, then prompt chunks up to `max_step_tokens` in
    order of arrival. When blocks run out, the youngest sequence is preempted: it frees its blocks
    and is computed again later, output included.
    """

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self._config = config
        self.executor = executor or build_executor(config)
        layout = self.executor.layout
        self._blocks = BlockAllocator(layout.num_blocks, layout.block_size, layout.groups)
        self.preemptions = 0
        self.steps = 0

    def generate(
        self,
        requests: Sequence[tuple[Sequence[int], SamplingParams]],
        masks: Sequence[MaskOf | None] | None = None,
    ) -> list[list[int]]:
        """The output ids of each request (a stop token included), in order.

        `masks`: the restriction of each request's tokens, or None. Raises InvalidRequest or
        ContextTooLong before the first step when a request cannot be served.
        """
        chosen = [None] * len(requests) if masks is None else masks
        sequences = [
            self._admit(prompt, sampling, mask_of)
            for (prompt, sampling), mask_of in zip(requests, chosen, strict=True)
        ]
        waiting = deque(sequences)
        running: list[_LocalSequence] = []
        while waiting or running:
            self._step(waiting, running)
            running = [sequence for sequence in running if not sequence.finished]
        check_blocks(self._blocks)
        return [sequence.output for sequence in sequences]

    def close(self) -> None:
        self.executor.close()

    def _admit(
        self, prompt: Sequence[int], sampling: SamplingParams, mask_of: MaskOf | None
    ) -> _LocalSequence:
        vocab_size = self.executor.vocab_size
        sampling.validate(vocab_size)
        if not prompt:
            raise InvalidRequest("prompt is empty", param="prompt")
        if not all(0 <= token < vocab_size for token in prompt):
            raise InvalidRequest(f"prompt has ids outside 0 .. {vocab_size - 1}", param="prompt")
        total = len(prompt) + sampling.max_tokens
        context = self.executor.max_model_len
        layout, chunk = self.executor.layout, self._config.max_step_tokens
        capacity = layout.tokens_in(layout.num_blocks, chunk=chunk, limit=context)
        if total > context:
            raise ContextTooLong(
                f"prompt ({len(prompt)}) + max_tokens ({sampling.max_tokens}) exceed the context "
                f"of {context} tokens",
                param="max_tokens",
            )
        if total > capacity:
            raise ContextTooLong(
                f"{total} tokens do not fit the KV pool of {capacity} tokens", param="prompt"
            )
        return _LocalSequence(prompt, sampling, mask_of, self._blocks.new_tables())

    def _step(self, waiting: deque[_LocalSequence], running: list[_LocalSequence]) -> None:
        while waiting and len(running) < self._config.max_running:
            chunk = self._config.max_step_tokens
            if self._blocks.num_free < self._blocks.pages_for(len(waiting[0].tokens), chunk):
                break
            running.append(waiting.popleft())
        planned: list[tuple[_LocalSequence, SequenceStep]] = []
        budget = self._config.max_step_tokens
        for sequence in sorted(running, key=lambda s: len(s.tokens) - s.computed > 1):
            if sequence not in running:
                continue  # preempted meanwhile
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count and self._make_room(sequence, count, planned, waiting, running):
                planned.append((sequence, self._plan(sequence, count)))
                budget -= count
        result = self.executor.run(StepBatch(sequences=tuple(step for _, step in planned)))
        if result.non_finite:
            raise Internal("the model's output is not finite", param="dtype")
        self.steps += 1
        for (sequence, step), token in zip(planned, result.tokens, strict=True):
            self._apply(sequence, step, token)

    def _plan(self, sequence: _LocalSequence, count: int) -> SequenceStep:
        end = sequence.computed + count
        last = end == len(sequence.tokens)
        history = sequence.history if last else None
        return SequenceStep(
            tokens=tuple(sequence.tokens[sequence.computed : end]),
            start=sequence.computed,
            block_tables=sequence.tables.for_step(sequence.computed),
            sampling=sequence.sampling if last else None,
            banned=sequence.sampling.banned(len(sequence.output)) if last else (),
            seen=history.seen() if history else b"",
            counts=history.counts() if history else b"",
            allowed=sequence.mask_of(sequence.output) if last and sequence.mask_of else None,
        )

    def _make_room(
        self,
        sequence: _LocalSequence,
        count: int,
        planned: list[tuple[_LocalSequence, SequenceStep]],
        waiting: deque[_LocalSequence],
        running: list[_LocalSequence],
    ) -> bool:
        """Allocate blocks for `count` more tokens, preempting younger sequences."""
        num_tokens = sequence.computed + count
        missing = sequence.tables.missing(num_tokens)
        while (blocks := self._blocks.allocate(missing)) is None:
            victim = running.pop()
            self._preempt(victim)
            waiting.appendleft(victim)
            planned[:] = [entry for entry in planned if entry[0] is not victim]
            if victim is sequence:
                return False
        sequence.tables.extend(num_tokens, blocks)
        return True

    def _preempt(self, sequence: _LocalSequence) -> None:
        self._blocks.free(sequence.tables.take())
        sequence.computed = 0
        self.preemptions += 1

    def _apply(self, sequence: _LocalSequence, step: SequenceStep, token: int | None) -> None:
        sequence.computed += len(step.tokens)
        self._blocks.free(sequence.tables.drop_unseen(sequence.computed))
        if token is not None:
            sequence.append(token)
        if sequence.finished:
            self._blocks.free(sequence.tables.take())
