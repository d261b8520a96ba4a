"""The fields of a chat."""

from __future__ import annotations

from functools import cached_property

from protocol.errors import InvalidRequest
from router.request.body import Int64
from router.request.chat_messages import Messages, check_messages
from router.request.generate_request import GenerateRequest, RequestKind
from router.request.tools import NamedTool, Tools, ToolUse, tool_use


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
