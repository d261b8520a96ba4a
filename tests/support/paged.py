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
from protocol.kv_layout import ONE_GROUP, KVGroup
from protocol.sampling import TokenLogprobs


def next_token(context: Sequence[int], seed: int, vocab: int = 1000) -> int:
    """The token that follows `context`."""
    digest = hashlib.blake2b(f"{seed}:{list(context)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % vocab


def expected_output(
    prompt: Sequence[int], seed: int, num_tokens: int, window: int | None = None
) -> list[int]:
    """What a request must produce, wherever it runs. `window`: what a token of the first KV group
    sees."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context[-window:] if window else context, seed))
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
    """Executor with `num_blocks` blocks of token slots; freed blocks keep their stale content.
    Every KV group holds the same tokens in blocks of its own."""

    def __init__(
        self, num_blocks: int, block_size: int, groups: tuple[KVGroup, ...] = ONE_GROUP
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.steps: list[StepBatch] = []

    def run(self, batch: StepBatch) -> StepResult:
        """Write every sequence's tokens, then sample from the contents of its block table."""
        self.steps.append(batch)
        written: set[tuple[int, int]] = set()
        for step in batch.sequences:
            for group in range(len(self.groups)):
                for offset, token in enumerate(step.tokens):
                    slot = self._slot(step, group, step.start + offset)
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

    def _slot(self, step: SequenceStep, group: int, position: int) -> tuple[int, int]:
        first = self.groups[group].first_token(step.start) // self.block_size
        number = position // self.block_size - first
        assert number >= 0
        return step.block_tables[group][number], position % self.block_size

    def _seen(self, step: SequenceStep, group: int, first: int) -> list[int]:
        """The tokens from `first` to the last of a step, as a group's blocks hold them."""
        places = range(first, step.start + len(step.tokens))
        return [self.slots[b][o] for b, o in (self._slot(step, group, i) for i in places)]

    def _sample(self, step: SequenceStep) -> int | None:
        firsts = [group.first_token(step.start) for group in self.groups]
        known = self._seen(step, 0, firsts[0])
        for group, first in enumerate(firsts):
            seen = self._seen(step, group, first)
            assert known[-len(seen) :] == seen[-len(known) :], "KV groups differ"
        if step.sampling is None:
            return None
        window = self.groups[0].window
        return next_token(known[-window:] if window else known, step.sampling.seed)


class LateSteps:
    """Runs steps like a device: in order, after `launch` has returned, as late as possible (in
    `wait`). Tokens of the previous step are fed into the next."""

    def __init__(self, run: Callable[[StepBatch], StepResult], depth: int) -> None:
        self.depth = depth
        self.num_ranks = 1
        self.token_s = 0.0
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

    def while_launching(self, function: Callable[[], None]) -> None:
        """Never call it: a launch takes no time."""

    @property
    def is_over(self) -> bool:
        """Never before `wait`."""
        return False

    def wait(self) -> StepResult:
        """Run the oldest step of the queue."""
        batch = self.launched[0]
        steps = tuple(self._fed(step) for step in batch.sequences)
        self._last = self._run(StepBatch(sequences=steps))
        self.launched.popleft()
        return self._last

    @property
    def lands_early(self) -> bool:
        """Whether the step before the one just queued ends while that is launched: every second."""
        return len(self.launched) > 1 and self.number % 2 == 0

    @property
    def num_over(self) -> int:
        """Steps that have run."""
        return self.number - len(self.launched)

    def blocks(self) -> set[int]:
        """The blocks that queued steps read and write."""
        steps = (step for batch in self.launched for step in batch.sequences)
        return {block for step in steps for table in step.block_tables for block in table}

    def _fed(self, step: SequenceStep) -> SequenceStep:
        if step.previous is None:
            return step
        token = self._last.tokens[step.previous]
        assert token is not None
        assert len(step.tokens) == 1
        return replace(step, tokens=(token,), previous=None)
