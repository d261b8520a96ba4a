"""The one request model that both front doors parse into, with the same checks and defaults.

Choices, the same on every door: an omitted model is the served one; an explicit `max_tokens` that
does not fit behind the prompt is refused, an unset one is the rest of the context (chat) or at
most 16 (completions); unknown fields are refused; `top_p: 0` is refused, `temperature` below 1e-4
is greedy; choice i of n uses seed + i, so choice 0 is what n = 1 gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from protocol.errors import InvalidRequest, Unsupported
from protocol.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS
from router.request import fields as read
from router.request import structured_output
from router.request import tools as tool_fields
from router.request.chat_messages import ChatMessage, parse_messages
from router.request.fields import Fields
from router.request.structured_output import StructuredOutput, parse_structured
from router.request.tools import ToolUse, parse_tools
from router.request.unserved import check_fields

MAX_CHOICES = 16
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16

#: A prompt of a completion: text, or token ids.
Prompt = str | Sequence[int]


class RequestKind(StrEnum):
    """Which of the two forms a request has."""

    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request as the client meant it: types checked, defaults of the API filled in.

    `max_tokens` None means unset; `max_tokens_param` is the name the client used for it. `logprobs`
    and `prompt_logprobs` count the likeliest tokens shown beside each token; None shows nothing.
    """

    kind: RequestKind
    model: str | None = None
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cache_salt: str = ""
    priority: int = 0
    service_tier: str | None = None
    timeout_s: float | None = None
    timeline: bool = False
    return_token_ids: bool = False
    structured: StructuredOutput | None = None
    tools: ToolUse | None = None

    @property
    def prompt_scores(self) -> int | None:
        """How many of the likeliest tokens workers report beside each token of the prompt; None
        when nobody looks at the prompt's log-probabilities."""
        shown = [self.prompt_logprobs, self.logprobs if self.echo else None]
        if self.max_tokens == 0:
            shown.append(0)
        return max((count for count in shown if count is not None), default=None)

    @property
    def scored(self) -> bool:
        """Whether the answer has log-probabilities of any kind."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def num_sequences(self) -> int:
        """Sequences that workers will run for it."""
        return self.n * max(1, len(self.prompts))


#: Fields that are what they say: an absent one has the default of GenerateRequest.
_PLAIN: dict[str, Callable[[Fields, str], object]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), read.number),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), read.number),
    **dict.fromkeys(("seed", "n", "min_tokens", "priority"), read.integer),
    **dict.fromkeys(("stream", "echo", "ignore_eos", "timeline", "return_token_ids"), read.boolean),
    **dict.fromkeys(("skip_special_tokens", "include_stop_str_in_output"), read.boolean),
    **dict.fromkeys(("model", "service_tier"), read.text),
}
_COMMON = (
    frozenset(_PLAIN) - {"echo"}
    | {"user", "top_k", "max_tokens", "logit_bias", "stop", "stop_token_ids", "stream_options"}
    | {"logprobs", "top_logprobs", "prompt_logprobs", "cache_salt", "timeout"}
    | structured_output.FIELDS
)
#: The names of the fields that have a meaning in a request of each kind.
SERVED = {
    RequestKind.CHAT: _COMMON | tool_fields.FIELDS | {"messages", "max_completion_tokens"},
    RequestKind.COMPLETION: _COMMON | {"prompt", "echo"},
}

#: Fields of the other kind, and what it is called.
_ELSEWHERE = {
    RequestKind.CHAT: dict.fromkeys(SERVED[RequestKind.COMPLETION], "completions, not of chat"),
    RequestKind.COMPLETION: dict.fromkeys(SERVED[RequestKind.CHAT], "chat, not of completions"),
}


def parse_request(kind: RequestKind, fields: Fields) -> GenerateRequest:
    """The request in `fields`. Raises InvalidRequest naming the first wrong field."""
    check_fields(fields, SERVED[kind], elsewhere=_ELSEWHERE[kind])
    chat = kind is RequestKind.CHAT
    # Without effect, so only checked: it may be large, and would be kept as long as the rest.
    read.text(fields, "user")
    given = {name: reader(fields, name) for name, reader in _PLAIN.items()}
    plain: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    _check_between(plain.get("n", 1), "n", 1, MAX_CHOICES)
    max_tokens, max_tokens_param = _max_tokens(fields)
    include_usage, continuous_usage = _stream_options(fields, stream=plain.get("stream", False))
    return GenerateRequest(
        kind=kind,
        prompts=() if chat else parse_prompts(fields.get("prompt")),
        messages=parse_messages(fields.get("messages")) if chat else (),
        top_k=_top_k(fields),
        logit_bias=_logit_bias(fields),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        stop=_stops(fields.get("stop")),
        stop_token_ids=_stop_token_ids(fields),
        logprobs=_logprobs(fields, chat=chat),
        prompt_logprobs=_count(fields, "prompt_logprobs"),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        cache_salt=_cache_salt(fields),
        timeout_s=_timeout(fields),
        structured=parse_structured(fields),
        tools=parse_tools(fields) if chat else None,
        **plain,
    )


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt or a batch: a string, token ids, or an array of either."""
    if value is None:
        raise InvalidRequest("prompt is required", param="prompt")
    if isinstance(value, str):
        return (read.as_text(value, "prompt"),)
    if not isinstance(value, Sequence):
        raise read.wrong_type(
            "prompt", "a string, an array of integers, or an array of these", value
        )
    if not value:
        raise InvalidRequest("prompt must not be an empty array", param="prompt")
    if isinstance(value[0], int) or read.are_ids(value):
        return (read.token_ids(value, "prompt"),)
    read.check_count(value, MAX_PROMPTS, "prompt")
    return tuple(_prompt(item) for item in value)


def _prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return read.as_text(value, "prompt")
    if isinstance(value, Sequence):
        if not value:
            raise InvalidRequest("prompt must not be an empty array", param="prompt")
        return read.token_ids(value, "prompt")
    raise read.wrong_type("prompt", "an array of strings or of arrays of integers", value)


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    old = read.integer(fields, "max_tokens")
    new = read.integer(fields, "max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens"
        )
    value, name = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    # Nothing but the prompt itself is asked for: to see it, or how likely it is.
    least = 0 if fields.get("echo") or fields.get("prompt_logprobs") is not None else 1
    if value is not None and value < least:
        raise InvalidRequest(f"{name} must be at least {least}, got {value}", param=name)
    return value, name


def _logprobs(fields: Fields, *, chat: bool) -> int | None:
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


def _count(fields: Fields, name: str) -> int | None:
    value = read.integer(fields, name)
    if value is not None:
        _check_between(value, name, 0, MAX_LOGPROBS)
    return value


def _top_k(fields: Fields) -> int:
    value = read.integer(fields, "top_k") or 0
    return 0 if value == -1 else value  # -1 is the other customary way to say "off"


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """Token ids as decimal strings, JSON's only keys, to what is added to their logits."""
    value = fields.get("logit_bias")
    if value is None:
        return ()
    biases = read.as_object(value, "logit_bias")
    read.check_count(biases, MAX_LOGIT_BIASES, "logit_bias")
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest(
                f"logit_bias: keys must be token ids, got {key[:40]!r}", param="logit_bias"
            )
    return tuple((int(key), read.as_number(bias, "logit_bias")) for key, bias in biases.items())


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, str | list):
        raise read.wrong_type("stop", "a string or an array of strings", value)
    items = [value] if isinstance(value, str) else value
    read.check_count(items, MAX_STOPS, "stop")
    stops = tuple(read.as_text(item, "stop") for item in items)
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop strings must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}",
                param="stop",
            )
    return stops


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("stop_token_ids")
    if value is None:
        return ()
    return tuple(read.token_ids(value, "stop_token_ids"))


def _stream_options(fields: Fields, *, stream: bool) -> tuple[bool, bool]:
    """Whether usage is wanted at the end, and in every chunk."""
    value = fields.get("stream_options")
    if value is None:
        return False, False
    options = read.as_object(value, "stream_options")
    if not stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    for name, item in options.items():
        if name in ("include_usage", "continuous_usage_stats") or item is None:
            continue
        # Padding against traffic analysis; false is what happens.
        if name != "include_obfuscation" or item:
            raise Unsupported(
                f"stream_options.{name} is not supported", param=f"stream_options.{name}"
            )
    usage, always = (
        read.as_boolean(options.get(name), f"stream_options.{name}") or False
        for name in ("include_usage", "continuous_usage_stats")
    )
    if always and not usage:
        raise InvalidRequest(
            "stream_options.continuous_usage_stats needs include_usage: true",
            param="stream_options.continuous_usage_stats",
        )
    return usage, always


def _cache_salt(fields: Fields) -> str:
    value = read.text(fields, "cache_salt")
    if value is not None and not 0 < len(value) <= MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, got {len(value)}",
            param="cache_salt",
        )
    return value or ""


def _timeout(fields: Fields) -> float | None:
    value = read.number(fields, "timeout")
    if value is not None and value <= 0:
        raise InvalidRequest(f"timeout must be positive, got {value}", param="timeout")
    return value


def _check_between(value: int, param: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{param} must be between {low} and {high}, got {value}", param=param)
