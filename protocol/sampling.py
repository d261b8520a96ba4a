"""How the next token is chosen, and when a sequence ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.errors import InvalidRequest

#: Temperatures below this act as greedy: dividing by them would overflow the logits.
GREEDY_TEMPERATURE = 1e-4
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one sequence, in token ids only.

    The noise for a token is a function of (seed, absolute position), so the result does not depend
    on batch, worker, preemption or resumption. The router always fills `seed` in: an unseeded
    request gets a random one, so that it too can be resumed exactly.

    max_tokens: output tokens wanted, counted over all attempts.
    min_tokens: no end-of-sequence or stop token is honoured before this many output tokens.
    stop_token_ids: tokens that end the sequence (the stop token is not part of the text).
    eos_token_ids: the model's own ends, filled in by the router; ignored with `ignore_eos`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken, with no noise."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    def ends_with(self, token: int, num_output_tokens: int) -> bool:
        """Whether `token`, as output number `num_output_tokens` (1-based), is a stop token."""
        if num_output_tokens <= self.min_tokens:
            return False
        if token in self.stop_token_ids:
            return True
        return not self.ignore_eos and token in self.eos_token_ids

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is out of range."""
        _require(
            math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0,
            "temperature",
            f"must be between 0 and 100, got {self.temperature}",
        )
        _require(
            math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0,
            "top_p",
            f"must be in (0, 1], got {self.top_p}",
        )
        _require(
            math.isfinite(self.min_p) and 0.0 <= self.min_p <= 1.0,
            "min_p",
            f"must be between 0 and 1, got {self.min_p}",
        )
        _require(0 <= self.top_k < 2**31, "top_k", f"must be 0 (off) or positive, got {self.top_k}")
        _require(
            0 <= self.seed <= MAX_SEED, "seed", f"must be between 0 and 2^63 - 1, got {self.seed}"
        )
        _require(self.max_tokens >= 1, "max_tokens", f"must be at least 1, got {self.max_tokens}")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        _require(
            len(self.stop_token_ids) <= 64,
            "stop_token_ids",
            f"at most 64 ids, got {len(self.stop_token_ids)}",
        )
        for token in self.stop_token_ids:
            _require(
                0 <= token < vocab_size,
                "stop_token_ids",
                f"id {token} is outside the vocabulary of {vocab_size}",
            )


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param} {message}", param=param)
