"""Reading which log-probabilities a request asks for."""

from __future__ import annotations

from protocol.errors import InvalidRequest
from protocol.sampling import MAX_LOGPROBS
from router import fields as read
from router.fields import Fields


def parse_logprobs(fields: Fields, *, chat: bool) -> int | None:
    """How many of the likeliest tokens to show beside each output token; None: nothing is shown.

    `logprobs: true` with `top_logprobs`, as OpenAI's chat has it; completions may also give the
    number itself as `logprobs`.
    """
    value, top = fields.get("logprobs"), _count(fields, "top_logprobs")
    if not chat and isinstance(value, int) and not isinstance(value, bool):
        if top is not None:
            raise InvalidRequest(
                "give the number as logprobs or as top_logprobs", param="top_logprobs"
            )
        return _count(fields, "logprobs")
    if not chat and value is not None and not isinstance(value, bool):
        raise read.wrong_type("logprobs", "an integer or a boolean", value)
    if read.boolean(fields, "logprobs"):
        return top or 0
    if top:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def parse_prompt_logprobs(fields: Fields) -> int | None:
    """The same for the tokens of the prompt."""
    return _count(fields, "prompt_logprobs")


def _count(fields: Fields, name: str) -> int | None:
    value = read.integer(fields, name)
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}", param=name
        )
    return value
