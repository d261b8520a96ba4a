"""How the next token is chosen, and when a sequence ends."""

from __future__ import annotations

import math

from protocol.errors import InvalidRequest
from protocol.message import Message

#: Temperatures below this act as greedy: dividing by them would overflow the logits.
GREEDY_TEMPERATURE = 1e-4
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 64


class SamplingParams(Message):
    """Sampling and stopping of one sequence, in token ids only.

    The noise for a token is a function of (seed, absolute position), so the result does not depend
    on batch, worker, preemption or resumption. The router always fills `seed` in: an unseeded
    request gets a random one, so that it too can be resumed exactly.

    presence_penalty, frequency_penalty: taken from the logit of a token that is in the output, once
    and once for each time (OpenAI). repetition_penalty: logits of tokens in prompt or output are
    divided by it where positive, multiplied where negative (Keskar et al., 2019). logit_bias:
    (token, what is added to its logit), at most once a token.

    logprobs: how many of the likeliest tokens to report beside each output token; None reports
    nothing. prompt_logprobs: the same for the tokens of the prompt; such a request must be computed
    whole, whatever KV of it is cached.

    max_tokens: output tokens wanted, counted over all attempts; 0 only scores the prompt.
    min_tokens: no end-of-sequence or stop token is honoured before this many output tokens.
    stop_token_ids: tokens that end the sequence (the stop token is not part of the text).
    eos_token_ids: the model's own ends, filled in by the router; ignored with `ignore_eos`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken, with no noise."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """Whether the next token depends on which tokens came before, beyond their KV."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def banned(self, num_output_tokens: int) -> tuple[int, ...]:
        """Ids that must not follow `num_output_tokens` output tokens: min_tokens is not reached."""
        if num_output_tokens >= self.min_tokens:
            return ()
        return self.stop_token_ids + (() if self.ignore_eos else self.eos_token_ids)

    def ends_with(self, token: int, num_output_tokens: int) -> bool:
        """Whether `token`, as output number `num_output_tokens` (1-based), is a stop token."""
        if num_output_tokens <= self.min_tokens:
            return False
        if token in self.stop_token_ids:
            return True
        return not self.ignore_eos and token in self.eos_token_ids

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is out of range."""
        _require_between(self.temperature, "temperature", 0, 100)
        _require_between(self.top_p, "top_p", 0, 1)
        _require(self.top_p > 0, "top_p", f"must be in (0, 1], got {self.top_p}")
        _require_between(self.min_p, "min_p", 0, 1)
        _require(
            0 <= self.top_k < 2**31,
            "top_k",
            f"must be between 0 (off) and 2^31 - 1, got {self.top_k}",
        )
        _require(
            0 <= self.seed <= MAX_SEED, "seed", f"must be between 0 and 2^63 - 1, got {self.seed}"
        )
        _require_between(self.presence_penalty, "presence_penalty", -2, 2)
        _require_between(self.frequency_penalty, "frequency_penalty", -2, 2)
        _require_between(self.repetition_penalty, "repetition_penalty", 0.01, 100)
        self._validate_logit_bias(vocab_size)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _require_between(count, name, 0, MAX_LOGPROBS)
        self._validate_lengths()
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"may have at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
        )
        for token in self.stop_token_ids:
            _require_known(token, "stop_token_ids", vocab_size)

    def _validate_lengths(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        _require(
            self.max_tokens >= least,
            "max_tokens",
            f"must be at least 1 (0 only scores a prompt), got {self.max_tokens}",
        )
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )

    def _validate_logit_bias(self, vocab_size: int) -> None:
        count = len(self.logit_bias)
        _require(
            count <= MAX_LOGIT_BIASES,
            "logit_bias",
            f"may have at most {MAX_LOGIT_BIASES} ids, got {count}",
        )
        _require(
            len({token for token, _ in self.logit_bias}) == count,
            "logit_bias",
            "names an id more than once",
        )
        for token, bias in self.logit_bias:
            _require_known(token, "logit_bias", vocab_size)
            _require_between(bias, "logit_bias", -100, 100)


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param} {message}", param=param)


def _require_between(value: float, param: str, low: float, high: float) -> None:
    _require(
        math.isfinite(value) and low <= value <= high,
        param,
        f"must be between {low} and {high}, got {value}",
    )


def _require_known(token: int, param: str, vocab_size: int) -> None:
    _require(
        0 <= token < vocab_size, param, f"id {token} is outside the vocabulary of {vocab_size}"
    )
