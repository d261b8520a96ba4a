"""The requests of each endpoint: completions, chat, Tokenize, Detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, cast

from msgspec import Meta

from protocol.errors import InvalidRequest
from router.request.body import Body, Int64
from router.request.chat_messages import Messages, check_messages
from router.request.generate_request import GenerateRequest, Prompt, RequestKind
from router.request.tools import NamedTool, Tools, ToolUse, tool_use

MAX_PROMPTS = 256


class CompletionRequest(GenerateRequest):
    """POST /v1/completions.

    prompt: a string, token ids, or an array of either (gRPC: `prompt`, `prompt_token_ids`,
        `prompts`).
    echo: the prompt comes before the output, with its log-probabilities if `logprobs`.
    """

    kind = RequestKind.COMPLETION

    prompt: str | Annotated[Sequence[int | str | Sequence[int]], Meta(min_length=1)]
    echo: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_prompts(self.prompts)
        for prompt in self.prompts:
            _check_prompt(prompt)

    @property
    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return (cast(Prompt, self.prompt),)
        return cast(Sequence[Prompt], self.prompt)

    @property
    def echoes_prompt(self) -> bool:
        return self.echo


def check_num_prompts(prompts: Sequence[object]) -> None:
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS}, got {len(prompts)}", param="prompt")


def _check_prompt(prompt: object) -> None:
    """Types alone allow arrays of prompts and token ids mixed."""
    if isinstance(prompt, int):
        raise InvalidRequest("prompt mixes prompts and token ids", param="prompt")
    if isinstance(prompt, list):
        if not prompt:
            raise InvalidRequest("prompt must not be an empty array", param="prompt")
        if set(map(type, prompt)) != {int}:
            raise InvalidRequest("prompt must be an array of integers", param="prompt")


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions.

    messages: roles system (or developer), user, assistant, tool; content a string or parts of type
        text, joined by line breaks.
    tools: functions that the model may call: [tool calls](tools.md).
    tool_choice: none, auto, required, or the function to call; auto when unset.
    parallel_tool_calls: false allows one call at most.
    max_completion_tokens: another name of `max_tokens`.
    """

    kind = RequestKind.CHAT

    messages: Messages
    tools: Tools = ()
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool = True
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False

    def __post_init__(self) -> None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ; give one",
                param="max_completion_tokens",
            )
        super().__post_init__()
        check_messages(self.messages)
        if self.tools or self.tool_choice is not None:
            _ = self.tool_use

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @cached_property
    def tool_use(self) -> ToolUse | None:
        return tool_use(
            self.tools,
            self.tool_choice,
            parallel=self.parallel_tool_calls,
            ignore_eos=self.ignore_eos,
        )


class TokenizeRequest(Body):
    """Text, or `messages` with `tools`, to token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    tools: Tools = ()
    tool_choice: str | NamedTool | None = None

    def __post_init__(self) -> None:
        if self.messages is not None:
            if self.prompt is not None:
                raise InvalidRequest("give either prompt or messages", param="messages")
            check_messages(self.messages)
        tools = self.tool_use()
        if self.messages is None and tools is not None:
            raise InvalidRequest("tools need messages", param="tools")
        if self.messages is None and self.prompt is None:
            raise InvalidRequest("prompt or messages is required", param="prompt")

    def tool_use(self) -> ToolUse | None:
        return tool_use(self.tools, self.tool_choice)


class DetokenizeRequest(Body):
    """Token ids to text."""

    model: str | None = None
    tokens: Sequence[Int64]
