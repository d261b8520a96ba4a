"""How long a step takes on a device, fitted to recorded runs of `benchmarks.worker_steps`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine.batch import StepBatch

#: Seconds of a step.
StepTime = Callable[[StepBatch], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A model on a device: weights are read once a step, or arithmetic takes longer.

    weights_s: reading the weights. token_s: arithmetic of one token. context_s: reading the KV of
    one token. pair_s: attention of one prompt token to one earlier token. launch_s: the rest.
    """

    weights_s: float
    token_s: float
    context_s: float
    pair_s: float
    launch_s: float

    def __call__(self, batch: StepBatch) -> float:
        """Seconds of this step. Weights and arithmetic overlap, but for a soft corner."""
        tokens, context, pairs = 0, 0, 0.0
        for step in batch.sequences:
            count = len(step.tokens)
            tokens += count
            if count == 1:
                context += step.start + 1
            else:
                pairs += count * (step.start + count / 2)
        products = math.sqrt(math.hypot(self.weights_s**2, (self.token_s * tokens) ** 2))
        return products + self.context_s * context + self.pair_s * pairs + self.launch_s


#: Llama-3.1-8B in bfloat16 on one H200.
H200_8B = Roofline(
    weights_s=3.85e-3, token_s=2.17e-5, context_s=3.16e-8, pair_s=1.17e-9, launch_s=2.5e-4
)
