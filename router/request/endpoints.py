"""The requests of each endpoint: completions, chat, Tokenize, Detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, cast

from msgspec import Meta

from protocol.errors import InvalidRequest
from router.request.body import Body, Int64
from router.request.chat_messages import (
    PLAIN,
    Messages,
    TemplateOptions,
    check_messages,
    template_options,
)
from router.request.generate_request import GenerateRequest, Prompt, RequestKind
from router.request.tools import Choice, Tools, ToolUse, tool_use

MAX_PROMPTS = 256


class CompletionRequest(GenerateRequest):
    """POST /v1/completions.

    prompt: a string, token ids, or an array of either (gRPC: `prompt`, `prompt_token_ids`,
        `prompts`).
    echo: the prompt comes before the output, with its log-probabilities if `logprobs`.
    """

    kind = RequestKind.COMPLETION
    endpoint = "completions"

    prompt: str | Annotated[Sequence[int | str | Sequence[int]], Meta(min_length=1)]
    echo: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_prompts(self.prompts)
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "echo and truncate_prompt_tokens exclude each other", param="truncate_prompt_tokens"
            )
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


MAX_DOCUMENTS = 1 << 10
Documents = Annotated[Sequence[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
#: What templates call it: Qwen and GLM, DeepSeek.
_NO_THINKING: dict[str, Any] = {"enable_thinking": False, "thinking": False}


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions.

    messages: roles system (or developer), user, assistant, tool; content a string or parts of type
        text, joined by line breaks.
    tools: functions that the model may call: [tool calls](tools.md).
    tool_choice: none, auto, required, or the function to call; auto when unset.
    parallel_tool_calls: false allows one call at most.
    max_completion_tokens: another name of `max_tokens`.
    add_generation_prompt: false ends the prompt behind the last message, before the mark of an
        answer.
    continue_final_message: the model continues the last message.
    documents: given to the model's template, if that knows documents.
    chat_template_kwargs: variables of the template, such as `enable_thinking` or `thinking_budget`.
    include_reasoning: false leaves thoughts out of the answer; they count as output.
    reasoning_effort: the template's variable of that name; `none` sets `enable_thinking` to false,
        the others to true.
    """

    kind = RequestKind.CHAT
    endpoint = "chat"

    messages: Messages
    tools: Tools = ()
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents: Documents = ()
    chat_template_kwargs: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True

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
        if not self._is_plain:
            _ = self.template_options

    @property
    def _is_plain(self) -> bool:
        """Whether the template is given nothing but messages and tools."""
        return not (
            self.chat_template_kwargs
            or self.continue_final_message
            or self.reasoning_effort is not None
            or self.add_generation_prompt is not None
            or self.documents
        )

    @cached_property
    def template_options(self) -> TemplateOptions:
        if self._is_plain:
            return PLAIN
        thinks = {None: {}, "none": _NO_THINKING}.get(self.reasoning_effort)
        if thinks is None:
            thinks = {name: not off for name, off in _NO_THINKING.items()}
            thinks |= {"reasoning_effort": self.reasoning_effort}
        return template_options(
            self.messages,
            generate=self.add_generation_prompt,
            continues=self.continue_final_message,
            documents=self.documents,
            variables=thinks | self.chat_template_kwargs,
        )

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
    tool_choice: Choice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it

    def __post_init__(self) -> None:
        if self.messages is not None:
            if self.prompt is not None:
                raise InvalidRequest("give either prompt or messages", param="messages")
            check_messages(self.messages)
            self.template_options()
        tools = self.tool_use()
        if self.messages is None and tools is not None:
            raise InvalidRequest("tools need messages", param="tools")
        if self.messages is None and self.prompt is None:
            raise InvalidRequest("prompt or messages is required", param="prompt")

    def tool_use(self) -> ToolUse | None:
        return tool_use(self.tools, self.tool_choice)

    def template_options(self) -> TemplateOptions:
        return template_options(
            self.messages or (),
            generate=self.add_generation_prompt,
            continues=self.continue_final_message,
            variables=self.chat_template_kwargs,
        )


class DetokenizeRequest(Body):
    """Token ids to text."""

    model: str | None = None
    tokens: Sequence[Int64]
