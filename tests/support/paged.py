"""A paged "engine" whose KV is the token ids themselves.

Every step writes its tokens into block slots and then reads the whole context back through the
block table; the next token is a hash of it. So a block that is shared, freed too early, not copied
or computed at a wrong position changes the tokens, and the expected output needs no model.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from msgspec.structs import replace

from engine.batch import SequenceStep, StepBatch, StepResult
from protocol.sampling import TokenLogprobs


def next_token(context: Sequence[int], seed: int, vocab: int = 1000) -> int:
    """The token that follows `context`."""
    digest = hashlib.blake2b(f"{seed}:{list(context)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % vocab


def expected_output(prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """What a request must produce, wherever it runs."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context, seed))
    return context[len(prompt) :]


def prompts() -> st.SearchStrategy[list[int]]:
    """Prompts of up to 30 tokens; many share a prefix, some are equal."""
    stem = [7, 3, 8, 1, 9, 2, 6, 4, 5, 3, 8, 8, 1]
    rest = st.lists(st.integers(0, 99), min_size=1, max_size=17)
    return st.builds(
        lambda shared, end: stem[:shared] + end,
        st.sampled_from([0, 3, 4, 8, 11, 12, 13]),
        st.one_of(rest, st.sampled_from([[5], [5, 6, 7, 8], [1] * 9])),
    )


class PagedTokens:
    """Executor with `num_blocks` blocks of token slots; freed blocks keep their stale content."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.steps: list[StepBatch] = []

    def run(self, batch: StepBatch) -> StepResult:
        """Write every sequence's tokens, then sample from the contents of its block table."""
        self.steps.append(batch)
        written: set[tuple[int, int]] = set()
        for step in batch.sequences:
            for offset, token in enumerate(step.tokens):
                slot = self._slot(step, step.start + offset)
                assert slot not in written, "two sequences write one slot in one step"
                written.add(slot)
                self.slots[slot[0]][slot[1]] = token
        return StepResult(
            tokens=tuple(self._sample(step) for step in batch.sequences),
            target_logprobs={
                index: tuple(TokenLogprobs(logprob=-float(t), rank=1) for t in step.targets)
                for index, step in enumerate(batch.sequences)
                if step.targets
            },
        )

    def _slot(self, step: SequenceStep, position: int) -> tuple[int, int]:
        return step.block_ids[position // self.block_size], position % self.block_size

    def _sample(self, step: SequenceStep) -> int | None:
        if step.sampling is None:
            return None
        end = step.start + len(step.tokens)
        context = [self.slots[b][o] for b, o in (self._slot(step, i) for i in range(end))]
        return next_token(context, step.sampling.seed)


class LateSteps:
    """Runs steps like a device: in order, after `launch` has returned, as late as possible (in
    `wait`). Tokens of the previous step are fed into the next."""

    def __init__(self, run: Callable[[StepBatch], StepResult], depth: int) -> None:
        self.depth = depth
        self.launched: deque[StepBatch] = deque()
        self.number = 0
        self._run = run
        self._last = StepResult(tokens=())

    def launch(self, batch: StepBatch) -> LateSteps:
        """Queue a step; at most `depth` are queued."""
        assert len(self.launched) < self.depth
        if not self.launched:
            assert all(step.previous is None for step in batch.sequences)
        self.launched.append(batch)
        self.number += 1
        return self

    def enter_thread(self) -> None:
        """Do nothing."""

    def wait(self) -> StepResult:
        """Run the oldest step of the queue."""
        batch = self.launched[0]
        steps = tuple(self._fed(step) for step in batch.sequences)
        self._last = self._run(StepBatch(sequences=steps))
        self.launched.popleft()
        return self._last

    @property
    def num_over(self) -> int:
        """Steps that have run."""
        return self.number - len(self.launched)

    def blocks(self) -> set[int]:
        """The blocks that queued steps read and write."""
        return {b for batch in self.launched for step in batch.sequences for b in step.block_ids}

    def _fed(self, step: SequenceStep) -> SequenceStep:
        if step.previous is None:
            return step
        token = self._last.tokens[step.previous]
        assert token is not None
        assert len(step.tokens) == 1
        return replace(step, tokens=(token,), previous=None)
