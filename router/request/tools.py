"""`tools`, `tool_choice` and `parallel_tool_calls` of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta

from protocol.errors import InvalidRequest
from router.request.body import Body, check_depth
from router.request.structured_output import schema_text

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: The schema of a function without `parameters`.
_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class FunctionName(Body, frozen=True, kw_only=True):
    """A function by its name."""

    name: str


class Function(FunctionName, frozen=True, kw_only=True):
    """A function. Its arguments follow `parameters`, a JSON Schema, whether `strict` or not."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body, frozen=True, kw_only=True):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedTool(Body, frozen=True, kw_only=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[Sequence[FunctionTool], Meta(max_length=MAX_TOOLS)]


class ToolChoice(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"  # as it likes
    REQUIRED = "required"  # at least one
    NAMED = "named"  # exactly the one that was named


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function. `schema` is the text of the JSON Schema of its arguments, `definition` the form
    that chat templates are given."""

    name: str
    schema: str
    definition: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request and how they are to be used."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    named: str | None
    parallel: bool

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that a forced call may name: all of them, or the one that was named."""
        if self.named is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.named)

    @property
    def definitions(self) -> list[Mapping[str, Any]]:
        """The tools as chat templates are given them."""
        return [tool.definition for tool in self.tools]


def tool_use(
    tools: Sequence[FunctionTool],
    choice: str | NamedTool | None,
    *,
    parallel: bool = True,
    ignore_eos: bool = False,
) -> ToolUse | None:
    """The tools that the model may use; None without any, and with `tool_choice: "none"`.

    Raises InvalidRequest naming the field.
    """
    described = tuple(_tool(tool.function, f"tools[{i}].function") for i, tool in enumerate(tools))
    names = [tool.name for tool in described]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequest(
                f"tools[{i}].function.name {name!r} is there twice",
                param=f"tools[{i}].function.name",
            )
    kind, named = _choice(choice, names)
    if kind is None or not tools:
        return None
    if kind is not ToolChoice.AUTO and ignore_eos:
        raise InvalidRequest(
            "ignore_eos cannot be combined with tool_choice: the output ends with the calls",
            param="ignore_eos",
        )
    return ToolUse(tools=described, choice=kind, named=named, parallel=parallel)


def _tool(function: Function, path: str) -> Tool:
    _check_name(function.name, f"{path}.name")
    described = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    schema = _NO_ARGUMENTS if function.parameters is None else function.parameters
    check_depth(schema, f"{path}.parameters")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"{path}.parameters.type must be 'object'", param=f"{path}.parameters.type"
        )
    return Tool(
        name=function.name,
        # The arguments of a call are an object, whatever else the schema would allow.
        schema=schema_text({**schema, "type": "object"}, f"{path}.parameters"),
        definition={"type": "function", "function": {**described, "parameters": schema}},
    )


def _check_name(name: str, path: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{path} must have 1 to 64 letters, digits, _ or -, got {name!r}", param=path
        )


def _choice(
    choice: str | NamedTool | None, names: Sequence[str]
) -> tuple[ToolChoice | None, str | None]:
    """How tools are chosen, None for no tools at all; and the name of the forced one."""
    param = "tool_choice"
    if choice is None or choice == "auto":
        return ToolChoice.AUTO, None
    if choice == "none":
        return None, None
    if not names:
        raise InvalidRequest("tool_choice needs tools", param=param)
    if choice == "required":
        return ToolChoice.REQUIRED, None
    if isinstance(choice, str):
        raise InvalidRequest(
            f"tool_choice must be none, auto, required or a function, got {choice!r}", param=param
        )
    name = choice.function.name
    _check_name(name, f"{param}.function.name")
    if name not in names:
        raise InvalidRequest(f"tool_choice: there is no tool {name!r}", param=param)
    return ToolChoice.NAMED, name
