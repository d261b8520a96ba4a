"""How long a step takes on a device, fitted to recorded runs of `benchmarks.worker_steps`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.batch import StepBatch

#: Seconds of a step.
StepTime = Callable[[StepBatch], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """A model on a device: its products by the rows of a step, and what comes on top.

    products: rows and seconds of all products of such a step; others take the next larger entry.
    context_s: reading the KV of one token. pair_s: attention of one prompt token to one earlier
    token. step_s and row_s: everything else that prompt tokens cost, for a step and for a row.
    Steps beyond the table take `large_step_s`, `large_row_s` a row and `large_pair_s` a pair;
    `history_s` for each chunk that follows on earlier tokens, `history_pair_s` for its pairs with
    them. stack_s, stack_sequence_s: what a step, and a sequence in it, takes longer in a serving
    worker.
    """

    products: tuple[tuple[int, float], ...]
    large_step_s: float
    large_row_s: float
    large_pair_s: float
    history_s: float
    history_pair_s: float
    context_s: float
    pair_s: float
    step_s: float
    row_s: float
    stack_s: float = 0.0
    stack_sequence_s: float = 0.0

    @property
    def step_rows(self) -> tuple[int, ...]:
        """Numbers of rows that steps are rounded up to."""
        return tuple(rows for rows, _ in self.products)

    def __call__(self, batch: StepBatch) -> float:
        """Seconds of this step."""
        rows, context, own, past, follows = 0, 0, 0.0, 0, 0
        stack_s = self.stack_s + self.stack_sequence_s * len(batch.sequences)
        for step in batch.sequences:
            count = len(step.tokens)
            rows += count
            if count == 1:
                context += step.start + 1
            else:
                own += count * count / 2
                past += count * step.start
                follows += step.start > 0
        products = next((seconds for size, seconds in self.products if size >= rows), None)
        if products is None:
            large_s = self.large_step_s + self.large_row_s * rows + self.large_pair_s * own
            large_s += self.history_s * follows + self.history_pair_s * past
            return stack_s + large_s + self.context_s * context
        rest = 0.0 if rows == len(batch.sequences) else self.step_s + self.row_s * rows
        return stack_s + products + rest + self.context_s * context + self.pair_s * (own + past)


#: Llama-3.1-8B in bfloat16 on one H200 (docs/adr/0036-fused-mixed-steps.md); a step of 16 decode
#: rows takes 4.85 ms, with a chunk of 128 or 256 tokens 6.8 or 10.1 ms.
H200_8B = MeasuredDevice(
    products=(
        (64, 4.1e-3),
        (80, 4.3e-3),
        (128, 4.5e-3),
        (144, 4.6e-3),
        (192, 5.2e-3),
        (256, 5.9e-3),
        (272, 6.6e-3),
        (320, 6.9e-3),
        (512, 9.8e-3),
        (528, 11.2e-3),
        (640, 12.5e-3),
        (768, 15.3e-3),
    ),
    large_step_s=3.0e-3,
    large_row_s=2.05e-5,
    large_pair_s=0.885e-9,
    history_s=2.7e-3,
    history_pair_s=1.25e-9,
    context_s=3.16e-8,
    pair_s=1.85e-9,
    step_s=0.9e-3,
    row_s=2.0e-6,
)

#: The same in a worker of a whole stack, as the inter-token times of its replays show
#: (benchmarks/results/stack, 2 x H200): 0.6 ms more beside 14 sequences, 1.3 ms beside 70.
H200_8B_SERVING = replace(H200_8B, stack_s=0.4e-3, stack_sequence_s=1.3e-5)

#: The same with products of more sizes, as logs of steps on two H200 show them (decision 91), and
#: with the chunk attention and products of decision 93.
H200_8B_STACK = replace(
    H200_8B_SERVING,
    products=tuple(
        (rows, ms * 1e-3)
        for rows, ms in (
            (64, 4.1), (80, 4.2), (96, 4.2), (128, 4.5), (144, 4.7), (192, 5.4), (256, 6.1),
            (272, 6.6), (320, 7.1), (432, 8.9), (512, 9.9), (528, 11.0), (592, 12.2), (640, 12.5),
            (688, 13.4), (720, 14.0), (768, 15.2), (816, 16.4), (1024, 19.5), (1152, 22.5),
            (1328, 26.0),
        )
    ),
    step_s=0.8e-3,
    pair_s=1.05e-9,
)  # fmt: skip
