"""Checks of a submitted request against what this worker can hold. The router made them before;
a worker still never lets a bad id or an impossible length reach the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.errors import ContextTooLong, InvalidRequest
from protocol.messages import Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitLimits:
    """What one worker can hold: context of the model, its vocabulary, its pool."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one output token, in the context and in the pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size) - 1

    def check(self, submit: Submit, *, whole_output: bool) -> None:
        """Raise InvalidRequest or ContextTooLong, naming the field.

        `whole_output`: the pool must hold prompt + max_tokens (decode), not just prompt + 1
        (prefill).
        """
        ids = submit.prompt_ids
        if not ids:
            raise InvalidRequest("prompt must have at least one token", param="prompt")
        for name, some in (("prompt", ids), ("output_ids", submit.output_ids)):
            if some and not 0 <= min(some) <= max(some) < self.vocab_size:
                raise InvalidRequest(
                    f"{name} has a token id outside the vocabulary of {self.vocab_size}", param=name
                )
        if not math.isfinite(submit.time_left_s):
            raise InvalidRequest("a deadline must be a time", param="time_left_s")
        submit.sampling.validate(self.vocab_size)
        max_tokens = submit.sampling.max_tokens
        if len(submit.output_ids) >= max_tokens > 0:
            raise InvalidRequest("all max_tokens were made already", param="max_tokens")
        total = len(ids) + max_tokens
        if total > self.max_model_len:
            raise ContextTooLong(
                f"prompt ({len(ids)}) + max_tokens ({max_tokens}) exceed the "
                f"context of {self.max_model_len} tokens",
                param="max_tokens",
            )
        needed = total if whole_output else len(ids) + len(submit.output_ids) + min(1, max_tokens)
        capacity = self.num_blocks * self.block_size
        if needed > capacity:
            raise ContextTooLong(
                f"{needed} tokens do not fit the KV pool of {capacity} tokens", param="prompt"
            )
