"""Requests of Tokenize and Detokenize."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import InvalidRequest
from router.request.body import Body, Int64
from router.request.chat_messages import Messages, check_messages
from router.request.tools import NamedTool, Tools, ToolUse, tool_use


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
