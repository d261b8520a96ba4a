"""How the next token is chosen, what the output must look like, when a sequence ends, and the
log-probabilities that are reported."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest, invalid_field
from protocol.message import Message

#: Temperatures below this act as greedy: dividing by them would overflow the logits.
GREEDY_TEMPERATURE = 1e-4
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 64
#: Fields that a model's generation_config.json may set for requests that leave them out.
WITH_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
#: Reported for anything lower, minus infinity included: JSON has no infinities.
LOWEST_LOGPROB = -9999.0

# The ranges that requests, workers and the documents of the API share.
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
MinTokens = Annotated[int, Meta(ge=0, le=2**63 - 1)]
StopTokenIds = Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)]


class SamplingParams(Message):
    """Sampling and stopping of one sequence, in token ids only.

    The noise for a token is a function of (seed, absolute position), so the result does not depend
    on batch, worker, preemption or resumption. The router always sets `seed`: an unseeded request
    gets a random one, so that it can be resumed exactly, too.

    presence_penalty, frequency_penalty: subtracted from the logit of a token in the output, once
    and once per occurrence (OpenAI). repetition_penalty: logits of tokens in prompt or output are
    divided by it where positive, multiplied where negative (Keskar et al., 2019). logit_bias:
    (token, what is added to its logit), at most once a token.

    logprobs: how many of the likeliest tokens to report beside each output token; None reports
    nothing. prompt_logprobs: the same for the tokens of the prompt; such a prompt is computed
    whole, whatever KV of it is cached.

    max_tokens: output tokens, counted over all attempts; 0 only scores the prompt.
    min_tokens: no end-of-sequence or stop token is honoured before this many output tokens.
    stop_token_ids: tokens that end the sequence (the stop token is not part of the text).
    eos_token_ids: the model's own ends, set by the router; ignored with `ignore_eos`.
    """

    temperature: Temperature = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # 0: off
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: Seed = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Annotated[tuple[tuple[int, Bias], ...], Meta(max_length=MAX_LOGIT_BIASES)] = ()
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    max_tokens: int = 16
    min_tokens: MinTokens = 0
    ignore_eos: bool = False
    stop_token_ids: StopTokenIds = ()
    eos_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
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
        try:
            msgspec.convert(self, _NamedFields, from_attributes=True)
        except msgspec.ValidationError as error:
            raise invalid_field(error) from None
        min_output = 1 if self.prompt_logprobs is None else 0
        _require(
            self.max_tokens >= min_output,
            "max_tokens",
            f"must be at least 1 (0 only scores a prompt), got {self.max_tokens}",
        )
        _require(
            self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        biased = [token for token, _ in self.logit_bias]
        _require(len(set(biased)) == len(biased), "logit_bias", "names an id more than once")
        for param, tokens in (("logit_bias", biased), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                _require(
                    0 <= token < vocab_size,
                    param,
                    f"id {token} is outside the vocabulary of {vocab_size}",
                )


class GrammarKind(StrEnum):
    """The language a grammar is written in."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema
    REGEX = "regex"  # a regular expression that matches the whole output
    CHOICE = "choice"  # a JSON array of strings, of which the output is one
    LARK = "lark"  # a context-free grammar in Lark's syntax, or GBNF


class Grammar(Message):
    """What an output must look like. Compiled grammars are cached by this value."""

    kind: GrammarKind
    source: str


class TokenLogprobs(Message):
    """Log-probability of one token, and the likeliest tokens at its position.

    Computed in float32 before biases, penalties, temperature and filters; all are finite. `rank` is
    1 for the likeliest token; `top_ids` are in order, likeliest first.
    """

    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    logprob: float
    rank: int


_TYPES = get_type_hints(SamplingParams, include_extras=True)
#: The same fields as an object: errors in an array would say the place, not the name.
_NamedFields = msgspec.defstruct(
    "_NamedFields", [(name, _TYPES[name]) for name in SamplingParams.__struct_fields__]
)


def usable_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of WITH_DEFAULTS in a generation_config.json that are in range."""
    found = {}
    for name in WITH_DEFAULTS:
        with contextlib.suppress(msgspec.ValidationError):
            if config.get(name) is not None:
                found[name] = msgspec.convert(config[name], _TYPES[name])
    return found


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param} {message}", param=param)
