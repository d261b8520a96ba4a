"""The table of a request's fields: their names, types, bounds, defaults and meanings.

It drives the parsing of JSON bodies and of gRPC messages, the OpenAPI document and the table in
docs/api.md. A new field is a line here (and one in protocol/wire/inference.proto).

The same over HTTP and gRPC: an omitted model is the served one; unknown fields are refused; an
explicit `max_tokens` that does not fit behind the prompt is refused; choice i of n uses seed + i,
so choice 0 is what n = 1 gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import force_setattr

from protocol.errors import InvalidRequest, Unsupported
from protocol.ids import new_request_id
from protocol.sampling import (
    MAX_LOGIT_BIASES,
    Bias,
    MinP,
    MinTokens,
    NumLogprobs,
    Penalty,
    RepetitionPenalty,
    StopTokenIds,
    Temperature,
    TopP,
)
from router.request.body import Body, Int64
from router.request.limited_text import AllowedTokenIds, BadWords, Schema
from router.request.structured_output import (
    ResponseFormat,
    StructuredOutput,
    StructuredOutputs,
    limits,
)
from router.request.tools import ToolUse

#: The HTTP header, or key of gRPC metadata, with the name of a request.
REQUEST_ID = "x-request-id"
_MAX_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestId:
    """`key` is unique in the cluster. `name` is what answers, logs and traces show: the client's
    name for the request, or the key."""

    key: str
    name: str


def make_request_id(client_name: str | None) -> RequestId:
    """A new id. The client's name is kept when it is 1 to 128 printable ASCII characters."""
    key, name = new_request_id(), (client_name or "").strip()
    valid = 0 < len(name) <= _MAX_CHARS and name.isascii() and name.isprintable()
    return RequestId(key=key, name=name if valid else key)


MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256
MAX_KEEP_S = 86400
DEFAULT_COMPLETION_TOKENS = 16

#: A prompt of a completion: text, or token ids.
Prompt = str | Sequence[int]
LogitBias = Annotated[
    dict[str, Bias],
    Meta(
        max_length=MAX_LOGIT_BIASES,
        extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,19}$"}},
    ),
]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class RequestKind(StrEnum):
    """Which of the two forms a request has."""

    CHAT = "chat"
    COMPLETION = "completion"


class StreamOptions(Body):
    """What a stream tells besides the output."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; false is what happens


class GenerateRequest(Body, dict=True):
    """The fields that chat and completions share, as clients send them. What types and bounds do
    not say is checked when a request is made: InvalidRequest names the field.

    model: the served one when unset; 404 for any other name; aliases are configured.
    temperature: below 1e-4 is greedy. This and the next three and repetition_penalty, when unset:
        the model's own (generation_config.json, `router.settings.sampling_defaults`), or else 1.0,
        1.0, 0, 0.0 and 1.0.
    top_p: only the likeliest tokens that have this probability together.
    top_k: 0 and -1 are off.
    min_p: least probability, relative to the likeliest token's.
    presence_penalty, frequency_penalty: over the output tokens, as OpenAI defines them.
    repetition_penalty: over prompt and output, as transformers defines it.
    logit_bias: token ids (as strings) to what is added to their logits.
    seed: random when unset; choice i uses `seed` + i, modulo 2^63.
    n: choice index = prompt number x n + i.
    max_tokens: unset: chat: the rest of the context, completions: 16, cut to what fits. An explicit
        value that does not fit behind the prompt is refused. 0 is for `echo` or `prompt_logprobs`.
    min_tokens: no end, stop token or stop string counts before.
    stop: the output is cut exactly before the first of these to be completed; special tokens count
        by their spelling, whether they are shown or not.
    stop_token_ids: a stop token counts as output but is not part of the text.
    ignore_eos: the model's own end tokens do not end the output.
    response_format: `text`, `json_object`, or `json_schema` with a schema:
        [structured output](structured_output.md).
    structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar: the same in vLLM's
        words, and regular expressions, choices, grammars, structural tags.
    bad_words: texts that the output does not contain (instead of structured output).
    allowed_token_ids: only these are sampled; likewise.
    logprobs: log-probabilities of output tokens; completions may give `top_logprobs` here.
    top_logprobs: how many of the likeliest tokens to show beside each output token.
    prompt_logprobs: the same for the tokens of the prompt; unset shows nothing.
    truncate_prompt_tokens: only so many of the prompt's last tokens are kept.
    skip_special_tokens: false writes special tokens out.
    include_stop_str_in_output: the output ends behind the stop string (or stop token), not before.
    stream: over gRPC true when unset.
    stream_options: `include_usage` adds a last chunk with the usage, `continuous_usage_stats` puts
        the usage so far into every chunk.
    timeout: seconds; as configured when unset; a gRPC call's own deadline counts too.
    timeline: where the time went: a field of the last object, and the trailer `baton-timeline`.
    return_token_ids: choices carry `token_ids`, the first `prompt_token_ids`; gRPC always has the
        output ids unless this is false.
    cache_salt: only requests of the same salt share cached KV (prefix cache).
    cache_keep_s: the conversation should return within so many seconds: host memory keeps its KV
        after that of others. Unset: as configured for requests with tools, else not.
    prompt_cache_retention: OpenAI's word for it: `24h` is a `cache_keep_s` of a day.
    priority: order among the caller's own waiting requests, lower first; it does not pass other
        callers.
    service_tier: a configured tier (`router.settings.service_tiers`): what is promised, and the
        share of a busy cluster. Unset, `auto` and `default`: the one of the caller's key. Answers
        name the tier when the request does.
    user: accepted, no effect.
    """

    kind: ClassVar[RequestKind]
    #: Whether a limit of the output that does not fit behind the prompt is cut, not refused.
    fits_output: ClassVar[bool] = False

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias = {}  # noqa: RUF012 - msgspec copies it
    seed: Int64 | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Int64 | None = None
    min_tokens: MinTokens = 0
    stop: _Stop | Annotated[Sequence[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None
    guided_grammar: str | None = None
    bad_words: BadWords = ()
    allowed_token_ids: AllowedTokenIds | None = None
    logprobs: bool | NumLogprobs = False
    top_logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    timeline: bool = False
    return_token_ids: bool = False
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] = ""
    cache_keep_s: Annotated[float, Meta(ge=0, le=MAX_KEEP_S)] | None = None
    prompt_cache_retention: str | None = None
    priority: Int64 = 0
    service_tier: str | None = None
    user: str = ""

    def __post_init__(self) -> None:
        if self.user:
            force_setattr(self, "user", "")  # it may be large
        if self.top_k is not None and self.top_k < 0:
            force_setattr(self, "top_k", 0)
        if self.top_logprobs is not None:
            self._check_top_logprobs()
        if self.stream_options is not None:
            self._check_stream_options(self.stream_options)
        if self.logit_bias and not all(map(_is_token_id, self.logit_bias)):
            raise InvalidRequest("logit_bias: keys must be token ids", param="logit_bias")
        if self.output_limit is not None:
            self._check_output_limit(self.output_limit)
        if self.structured is not None and self.ignore_eos:
            param = self.structured.param
            raise InvalidRequest(
                f"ignore_eos cannot be combined with {param}: the output ends where its form does",
                param="ignore_eos",
            )

    @property
    def prompts(self) -> Sequence[Prompt]:
        return ()

    @property
    def num_sequences(self) -> int:
        return self.n * max(1, len(self.prompts))

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None or isinstance(self.stop, str):
            return () if self.stop is None else (self.stop,)
        return tuple(self.stop)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Token ids with what is added to their logits."""
        return tuple((int(token), bias) for token, bias in self.logit_bias.items())

    def returns_within(self, tools_keep_s: float) -> float:
        """Seconds within which its conversation should return; 0 when nothing is known."""
        if self.cache_keep_s is not None:
            return self.cache_keep_s
        if self.prompt_cache_retention == "24h":
            return MAX_KEEP_S
        return tools_keep_s if self.tool_use is not None else 0.0

    @property
    def output_limit(self) -> int | None:
        """Requested output tokens; None when unset."""
        return self.max_tokens

    @property
    def output_limit_param(self) -> str:
        return "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are shown beside each output token; None: no
        log-probabilities."""
        if isinstance(self.logprobs, bool):
            return (self.top_logprobs or 0) if self.logprobs else None
        return self.logprobs

    @property
    def echoes_prompt(self) -> bool:
        """Whether the prompt comes before the output."""
        return False

    @property
    def prompt_scores(self) -> int | None:
        """How many of the likeliest tokens workers report beside each token of the prompt; None
        when the answer needs no log-probabilities of the prompt."""
        shown = [self.prompt_logprobs, self.num_logprobs if self.echoes_prompt else None]
        if self.output_limit == 0:
            shown.append(0)
        return max((count for count in shown if count is not None), default=None)

    @property
    def scored(self) -> bool:
        """Whether the answer has log-probabilities of any kind."""
        return self.num_logprobs is not None or self.prompt_logprobs is not None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @cached_property
    def tool_use(self) -> ToolUse | None:
        return None

    @cached_property
    def structured(self) -> StructuredOutput | None:
        """What the output must look like; whether the grammar compiles is found out later."""
        forms = self.response_format, self.structured_outputs
        guided = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        limited = self.bad_words or self.allowed_token_ids
        if guided == (None, None, None, None) and forms == (None, None) and not limited:
            return None
        found = [form.structured() for form in forms if form is not None]
        found += StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        ).grammars("guided_")
        found += limits(self.bad_words, self.allowed_token_ids or ())
        requested = [one for one in found if one is not None]
        if len(requested) > 1:
            raise InvalidRequest(
                f"{requested[0].param} and {requested[1].param} both say what the output must look "
                "like; give one",
                param=requested[1].param,
            )
        return requested[0] if requested else None

    def _check_top_logprobs(self) -> None:
        if not isinstance(self.logprobs, bool):
            raise InvalidRequest(
                "give the number as logprobs or as top_logprobs", param="top_logprobs"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")

    def _check_stream_options(self, options: StreamOptions) -> None:
        if not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        if options.include_obfuscation:
            param = "stream_options.include_obfuscation"
            raise Unsupported(f"{param} is not supported", param=param)
        if options.continuous_usage_stats and not options.include_usage:
            param = "stream_options.continuous_usage_stats"
            raise InvalidRequest(f"{param} needs include_usage: true", param=param)

    def _check_output_limit(self, limit: int) -> None:
        only_prompt = self.echoes_prompt or self.prompt_logprobs is not None
        minimum, param = 0 if only_prompt else 1, self.output_limit_param
        if limit < minimum:
            raise InvalidRequest(f"{param} must be at least {minimum}, got {limit}", param=param)


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 20
