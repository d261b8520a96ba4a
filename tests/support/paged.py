"""A paged "engine" whose KV is the token ids themselves.

Every step writes its tokens into block slots and then reads the whole context back through the
block table; the next token is a hash of what it read. So a block that is shared, freed too early,
not copied or computed at a wrong position changes the tokens, and the right answer needs no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from engine.batch import SequenceStep, StepBatch, StepResult


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


class PagedTokens:
    """Executor with `num_blocks` blocks of token slots; freed blocks keep their stale content."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.steps: list[StepBatch] = []

    def run(self, batch: StepBatch) -> StepResult:
        """Write every sequence's tokens, then sample from what the block tables show."""
        self.steps.append(batch)
        written: set[tuple[int, int]] = set()
        for step in batch.sequences:
            for offset, token in enumerate(step.tokens):
                slot = self._slot(step, step.start + offset)
                assert slot not in written, "two sequences write one slot in one step"
                written.add(slot)
                self.slots[slot[0]][slot[1]] = token
        return StepResult(tokens=tuple(self._sample(step) for step in batch.sequences))

    def _slot(self, step: SequenceStep, position: int) -> tuple[int, int]:
        return step.block_ids[position // self.block_size], position % self.block_size

    def _sample(self, step: SequenceStep) -> int | None:
        if step.sampling is None:
            return None
        end = step.start + len(step.tokens)
        context = [self.slots[b][o] for b, o in (self._slot(step, i) for i in range(end))]
        return next_token(context, step.sampling.seed)
