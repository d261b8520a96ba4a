"""Settings of one router."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from router.auth.keys import ServiceTier
from router.auth.tls import TlsConfig
from router.text.reasoning import ReasoningFormat
from router.text.tool_formats import ToolFormat


class DefaultsOf(StrEnum):
    """Whose defaults sampling has."""

    MODEL = "model"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router process: its model, limits and deadlines.

    model_path: folder with config.json, tokenizer.json and, for chat, a template.
    served_model_name: the name clients use; the folder's name when empty. `model_aliases` work too.
    max_model_len: context in tokens; the model's own when None. Workers may lower it further.
    max_requests: sequences in flight (n and batches count each); beyond it 429 /
        RESOURCE_EXHAUSTED.
    max_queued_requests, max_queued_tokens: requests that wait in the router, and their uncached
        prompt tokens; beyond it 429 / RESOURCE_EXHAUSTED. These and max_requests hold for each
        router process.
    dispatch_window_s: seconds of prefill work that workers are given ahead; the rest waits in the
        router, in fair order.
    service_tiers: classes of requests by name: latency targets and weight.
    strict_requests: refuse HTTP requests with fields that are unknown or without effect; otherwise
        they are served and a header `baton-ignored-fields` names those fields.
    response_store_bytes, response_store_s: memory for responses of /v1/responses that clients may
        continue or read, and how long each is kept; the oldest go first. Other routers ask this one
        for its responses, which are lost with it. 0: none are stored.
    max_body_bytes, max_message_bytes: largest HTTP body and gRPC message read. Parsing one holds up
        every stream for about 10 ms per MiB.
    max_connections: open connections of each front end, idle ones included; beyond it HTTP answers
        503 and gRPC closes. Keep it below half of the process's limit of open files.
    cors_origins: origins whose pages may call from a browser, "*" for all; none by default.
    default_timeout_s, max_timeout_s: deadline of a request that names none, and the longest
        allowed.
    local_prefill_tokens: prompts with up to this many tokens that are not cached on their decode
        worker are prefilled there.
    local_remainder_tokens: so are prompts of which a decode worker has cached all but up to this
        many tokens, if prefill would have to compute four times as many; 0: none are.
    local_gain_s: so is a prompt whose first token would come so many seconds sooner there than from
        prefill, by the backlogs and rates that both report; 0: none is. Decode's target_step_s
        bounds the steps that its chunks are part of, and so the gaps of other streams. Below 0.2,
        prompts that wait go from any worker to one that has their first tokens in time.
    prefix_tokens_per_sequence: so many cached prompt tokens on a decode worker make up for one more
        sequence there.
    prefix_cache_per_key: whether only requests of the same API key share cached KV; None: if there
        are keys. Otherwise the time to the first token and the count of cached tokens reveal
        whether another key has sent the same prefix lately.
    tools_keep_s: a conversation with tools should return within so many seconds: host memory of the
        workers keeps its KV after that of others; 0: like them.
    max_attempts: attempts at an output whose worker was lost or failed.
    resume_wait_s: how long an accepted request waits for a worker when there is none: long enough
        to detect the loss of the only one (three health checks) and replace it.
    silence_s: an event stream silent for longer is broken; at least 4 x the workers' `heartbeat_s`.
    submit_timeout_s, connect_timeout_s: deadlines of calls to workers. A prompt leaves a worker
        that does not answer sooner, within a second, if others can take it.
    timeline_wait_s: how long the last message waits for prefill's spans of a requested timeline.
    retry_after_s: the least `Retry-After` of a refusal.
    keep_alive_s: idle HTTP connections live this long; above what load balancers use (60 to 75 s).
    text_threads: threads that template, tokenise and parse, off the event loop.
    neutralise_control_tokens: whether a role marker inside chat content is read as plain text.
    chat_template: a file to use instead of the model's own chat template.
    reasoning_format: how the model marks its thoughts (think, seed, mistral, cohere, harmony); none
        leaves them in the text; detected from the chat template when empty.
    tool_format: how the model writes tool calls (docs/tools.md); detected from the chat template
        when empty.
    sampling_defaults: where temperature, top_k, top_p, min_p and repetition_penalty of a request
        that leaves them out come from: `model`, its generation_config.json; or `openai`, which is
        1.0, off, 1.0, 0.0 and 1.0.
    reuse_port: whether several routers of one host may share a port (SO_REUSEPORT).
    admin_enabled: whether gRPC serves baton.v1.Admin, which scales and drains.
    pages_enabled: whether `/` is a chat page and `/docs` shows the HTTP API. The pages need no key;
        what they call does.
    drain_s: time for requests in flight to end when the router stops.
    api_keys_file: YAML file of the keys that may call (docs/security.md), reloaded when
        it changes; empty: no key is needed.
    otlp_endpoint: where OpenTelemetry spans of requests are sent, over OTLP/HTTP; empty: where the
        OTEL_* variables say, or nowhere.
    metrics_need_key: whether /metrics needs an API key like everything else. It names every worker
        and is costly on clusters of hundreds.
    access_log: log every request in one line at its end: id, key, tokens, seconds, code.
    vllm_metric_names: export the shared metrics as `vllm:*` too.
    """

    model_path: str
    served_model_name: str = ""
    model_aliases: tuple[str, ...] = ()
    max_model_len: int | None = None
    max_requests: int = 1024
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 << 20
    dispatch_window_s: float = 2.0
    service_tiers: dict[str, ServiceTier] = field(default_factory=dict)
    strict_requests: bool = False
    response_store_bytes: int = 256 << 20
    response_store_s: float = 86400.0
    max_body_bytes: int = 8 << 20
    max_message_bytes: int = 8 << 20
    max_connections: int = 4096
    cors_origins: tuple[str, ...] = ()
    default_timeout_s: float = 600.0
    max_timeout_s: float = 3600.0
    local_prefill_tokens: int = 16
    local_remainder_tokens: int = 512
    local_gain_s: float = 0.0
    prefix_tokens_per_sequence: int = 256
    prefix_cache_per_key: bool | None = None
    tools_keep_s: float = 300.0
    max_attempts: int = 4
    resume_wait_s: float = 60.0
    silence_s: float = 5.0
    submit_timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    timeline_wait_s: float = 0.5
    retry_after_s: float = 1.0
    keep_alive_s: int = 90
    text_threads: int = 2
    neutralise_control_tokens: bool = True
    chat_template: str = ""
    tool_format: str = ""
    reasoning_format: str = ""
    sampling_defaults: DefaultsOf = DefaultsOf.MODEL
    reuse_port: bool = True
    admin_enabled: bool = True
    pages_enabled: bool = True
    drain_s: float = 30.0
    api_keys_file: str = ""
    tls: TlsConfig = field(default_factory=TlsConfig)
    otlp_endpoint: str = ""
    metrics_need_key: bool = False
    access_log: bool = False
    vllm_metric_names: bool = False

    def __post_init__(self) -> None:
        if not self.model_path:
            raise ValueError("model_path must not be empty")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if type(value) in (int, float) and name != "max_model_len":
                lowest = "at least 0" if name in _ZERO_IS_NONE else "positive"
                if value < 0 or (value == 0 and name not in _ZERO_IS_NONE):
                    raise ValueError(f"{name} must be {lowest}, got {value}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        for origin in self.cors_origins:
            if origin != "*" and (not _ORIGIN.fullmatch(origin)):
                raise ValueError(
                    f"cors_origins must be like https://app.example.com, or *, got {origin!r}"
                )
        self._check_formats()
        if self.default_timeout_s > self.max_timeout_s:
            raise ValueError(
                f"default_timeout_s ({self.default_timeout_s}) must not exceed "
                f"max_timeout_s ({self.max_timeout_s})"
            )

    @property
    def private_prefixes(self) -> bool:
        """Whether only requests of the same key, or client certificate, share cached KV."""
        if self.prefix_cache_per_key is not None:
            return self.prefix_cache_per_key
        return bool(self.api_keys_file or self.tls.client_ca_file)

    def _check_formats(self) -> None:
        for name, formats in (("tool_format", ToolFormat), ("reasoning_format", ReasoningFormat)):
            value = getattr(self, name)
            if value not in ("", *formats):
                raise ValueError(f"{name} must be one of {', '.join(formats)}, got {value!r}")

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model_path).name


#: https://www.rfc-editor.org/rfc/rfc6454#section-6.2
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_ZERO_IS_NONE = (
    "tools_keep_s",
    "response_store_bytes",
    "local_prefill_tokens",
    "local_remainder_tokens",
    "local_gain_s",
)
