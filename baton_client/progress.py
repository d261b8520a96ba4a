"""What a stream has so far, when a failed call is tried again, and how its output goes on. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from baton_client.errors import CallError
from protocol.wire import inference_pb2 as wire

#: What completions have when `max_tokens` is unset.
_DEFAULT_TOKENS = 16
#: Options with which the rest of an output depends on more than its tokens so far.
_NOT_RESUMABLE = (
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "presence_penalty"),
    *("frequency_penalty", "response_format", "structured_outputs", "guided_json"),
    *("guided_regex", "guided_grammar", "tool_choice", "suffix", "best_of"),
)
_REPEATED = ("guided_choice", "tools", "bad_words", "allowed_token_ids")
#: What only the first part of a chat's output needs.
_OF_CHAT = (
    *("max_completion_tokens", "add_generation_prompt", "continue_final_message", "documents"),
    *("chat_template_kwargs", "reasoning_effort", "parallel_tool_calls"),
    "include_reasoning",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When a failed call is tried again, always within its deadline: up to `attempts` calls in all
    without progress, after a random time that doubles from `first_s` up to `max_s`, and not before
    the time that the router names."""

    attempts: int = 5
    first_s: float = 0.1
    max_s: float = 10.0
    codes: frozenset[grpc.StatusCode] = frozenset(
        {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
    )
    draw: Callable[[], float] = random.random

    def delay_s(self, failures: int, error: CallError) -> float | None:
        """Seconds until the next try after so many failures; None: there is none."""
        if failures >= self.attempts or error.status not in self.codes:
            return None
        if error.status is grpc.StatusCode.RESOURCE_EXHAUSTED and error.code != "overloaded":
            return None  # a message that is too large stays so
        backoff_s = min(self.max_s, self.first_s * 2.0 ** (failures - 1))
        return max(error.retry_after_s or 0.0, backoff_s * (0.5 + self.draw() / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """What a message adds to one choice."""

    index: int
    text: str
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    tool_calls: Sequence[wire.ToolCallDelta] = ()
    logprobs: Sequence[wire.TokenLogprob] = ()


@dataclass(slots=True, kw_only=True)
class WholeOutput:
    """A whole output: of each choice its text, reasoning, tokens and end."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    tool_calls: list[list[wire.ToolCallDelta]] = field(default_factory=list)
    usage: wire.Usage | None = None
    timeline: wire.Timeline | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts[0] if self.texts else ""

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended; empty while it has not."""
        return self.finish_reasons[0] if self.finish_reasons else ""

    def add(self, part: OutputPart) -> None:
        while len(self.texts) <= part.index:
            self.texts.append("")
            self.reasonings.append("")
            self.token_ids.append([])
            self.finish_reasons.append("")
            self.tool_calls.append([])
        self.texts[part.index] += part.text
        self.reasonings[part.index] += part.reasoning
        self.token_ids[part.index] += part.token_ids
        self.finish_reasons[part.index] = part.finish_reason or self.finish_reasons[part.index]
        for delta in part.tool_calls:
            self._add_call(self.tool_calls[part.index], delta)

    @staticmethod
    def _add_call(calls: list[wire.ToolCallDelta], delta: wire.ToolCallDelta) -> None:
        if delta.index < len(calls):
            calls[delta.index].arguments += delta.arguments
        else:
            calls.append(wire.ToolCallDelta.FromString(delta.SerializeToString()))


class Progress:
    """One output over any number of calls.

    The noise of sampling depends only on seed and position, so the tokens so far, given as a
    prompt with the same seed, are continued by the tokens that would have come.
    """

    def __init__(self, request: wire.GenerateRequest, *, retry: Retry, resume: bool) -> None:
        self.answer = WholeOutput()
        self.request_id = ""
        self._request = request
        self._retry = retry
        self._resumable = resume and is_resumable(request)
        self._prompt: list[int] = []
        self._failures = 0
        self._resumed = False
        if self._resumable:
            request.return_token_ids = True
            if not request.HasField("seed"):
                request.seed = random.SystemRandom().randrange(1 << 62)

    def ended(self) -> bool:
        """Whether the only choice of a resumable request has ended."""
        return self._resumable and bool(self.answer.finish_reason)

    @property
    def needs_context(self) -> bool:
        """Whether the next request needs the model's context: there is no `max_tokens`."""
        limits = ("max_tokens", "max_completion_tokens")
        return bool(self._num_tokens) and not any(map(self._request.HasField, limits))

    def next_request(self, context: int = 0) -> wire.GenerateRequest:
        """The request of the next call: the first one, or one for the rest of the output."""
        if not self._num_tokens:
            return self._request
        self._resumed = True
        so_far = self.answer.token_ids[0]
        rest = wire.GenerateRequest.FromString(self._request.SerializeToString())
        for name in ("input", *_OF_CHAT, "truncate_prompt_tokens"):
            rest.ClearField(name)
        rest.prompt_token_ids.ids.extend([*self._prompt, *so_far])
        rest.max_tokens = self._max_tokens(context) - len(so_far)
        if rest.HasField("min_tokens"):
            rest.min_tokens = max(0, rest.min_tokens - len(so_far))
        return rest

    def take(self, message: wire.GenerateResponse) -> list[OutputPart]:
        """Add a message; what it adds to the choices."""
        parts = []
        for choice in message.choices:
            if choice.prompt_token_ids and not self._prompt:
                self._prompt = list(choice.prompt_token_ids)
            part = OutputPart(
                index=choice.index,
                text=choice.text,
                reasoning=choice.reasoning,
                token_ids=tuple(choice.token_ids),
                finish_reason=choice.finish_reason or None,
                tool_calls=tuple(choice.tool_calls),
                logprobs=tuple(choice.logprobs),
            )
            self.answer.add(part)
            parts.append(part)
        if message.HasField("usage") and not self._resumed:
            self.answer.usage = message.usage
        elif self.ended():  # the router counts only its part, or its count may be lost
            self.answer.usage = self._counted()
        if message.HasField("timeline"):
            self.answer.timeline = message.timeline
        self.request_id = message.id or self.request_id
        self._failures = 0
        return parts

    def retry_after_s(self, error: CallError) -> float | None:
        """Seconds until the next call after a failed one; None when the output ends with it."""
        error.text = self.answer.text
        error.token_ids = tuple(self.answer.token_ids[0]) if self.answer.token_ids else ()
        began = bool(self.answer.texts)
        lost = error.status is grpc.StatusCode.UNAVAILABLE
        # Within a thought the rest would come as text: a completion has no thoughts.
        thinking = began and bool(self.answer.reasonings[0]) and not self.answer.text
        if began and (thinking or not (self._resumable and lost and self._prompt)):
            return None
        self._failures += 1
        return self._retry.delay_s(self._failures, error)

    @property
    def _num_tokens(self) -> int:
        return len(self.answer.token_ids[0]) if self._resumable and self.answer.token_ids else 0

    def _max_tokens(self, context: int) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            if self._request.HasField(name):
                limit: int = getattr(self._request, name)
                return limit
        rest = context - len(self._prompt)
        if self._request.HasField("chat"):
            return rest
        return min(rest, max(_DEFAULT_TOKENS, self._request.min_tokens))

    def _counted(self) -> wire.Usage:
        prompt, output = len(self._prompt), self._num_tokens
        return wire.Usage(
            prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output
        )


def is_resumable(request: wire.GenerateRequest) -> bool:
    """Whether the rest of an output follows from its tokens alone."""
    if request.n > 1 or request.HasField("prompts"):
        return False
    if any(len(getattr(request, name)) for name in _REPEATED):
        return False
    return not any(request.HasField(name) for name in _NOT_RESUMABLE)
