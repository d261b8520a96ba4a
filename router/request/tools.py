"""`tools`, `tool_choice` and `parallel_tool_calls` of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta

from protocol.errors import InvalidRequest
from router.request.body import Body, check_depth

#: Agents with several servers of tools have hundreds.
MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
#: The schema of a function without `parameters`.
_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class FunctionName(Body):
    """A function by its name."""

    name: str


class Function(FunctionName, dict=True):
    """A function. Its arguments follow `parameters`, a JSON Schema, where calls are forced; where
    they are not, if it is `strict`, in formats whose calls are JSON within text."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @cached_property
    def schema(self) -> str:
        """The JSON Schema of the arguments as text: an object, whatever else `parameters` allow."""
        parameters = _NO_ARGUMENTS if self.parameters is None else self.parameters
        return json.dumps({**parameters, "type": "object"}, ensure_ascii=False)

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of its parameters by name, in order."""
        properties = (self.parameters or {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    @property
    def definition(self) -> Mapping[str, Any]:
        described = {"name": self.name}
        if self.description is not None:
            described["description"] = self.description
        parameters = _NO_ARGUMENTS if self.parameters is None else self.parameters
        return {"type": "function", "function": {**described, "parameters": parameters}}


class FunctionTool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedTool(Body, tag_field="type", tag="function"):
    """The tool that must be called."""

    function: FunctionName


class NamedTools(Body):
    """Tools by their names, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[Sequence[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body, tag_field="type", tag="allowed_tools"):
    """The tools that may be called. The prompt keeps all of them, so that its KV stays cached."""

    allowed_tools: NamedTools


Tools = Annotated[Sequence[FunctionTool], Meta(max_length=MAX_TOOLS)]
Choice = str | NamedTool | AllowedTools


class ToolChoice(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"  # as it likes
    REQUIRED = "required"  # at least one
    NAMED = "named"  # exactly the one that was named


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request and how they are to be used; `allowed` are the names that calls may
    have, None: all of them."""

    tools: tuple[Function, ...]
    choice: ToolChoice
    allowed: frozenset[str] | None
    parallel: bool

    @property
    def callable_tools(self) -> tuple[Function, ...]:
        """The tools that a call may name."""
        if self.allowed is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name in self.allowed)

    @property
    def strict(self) -> bool:
        """Whether the arguments of a tool have to follow their schema even where calls are free."""
        return any(tool.strict for tool in self.callable_tools)

    @property
    def definitions(self) -> list[Mapping[str, Any]]:
        return [tool.definition for tool in self.tools]


def tool_use(
    tools: Sequence[FunctionTool],
    choice: Choice | None,
    *,
    parallel: bool = True,
    ignore_eos: bool = False,
) -> ToolUse | None:
    """The tools that the model may use; None without any, and with `tool_choice: "none"`.

    Raises InvalidRequest naming the field.
    """
    functions = tuple(tool.function for tool in tools)
    names: list[str] = []
    for i, function in enumerate(functions):
        path = f"tools[{i}].function"
        _check_function(function, path)
        if function.name in names:
            raise InvalidRequest(
                f"{path}.name {function.name!r} is there twice", param=f"{path}.name"
            )
        names.append(function.name)
    kind, allowed = _choice(choice, names)
    if kind is None or not tools:
        return None
    if kind is not ToolChoice.AUTO and ignore_eos:
        raise InvalidRequest(
            "ignore_eos cannot be combined with tool_choice: the output ends with the calls",
            param="ignore_eos",
        )
    return ToolUse(tools=functions, choice=kind, allowed=allowed, parallel=parallel)


def _check_function(function: Function, path: str) -> None:
    _check_name(function.name, f"{path}.name")
    check_depth(function.parameters, f"{path}.parameters")
    if (function.parameters or {}).get("type", "object") != "object":
        raise InvalidRequest(
            f"{path}.parameters.type must be 'object'", param=f"{path}.parameters.type"
        )


def _check_name(name: str, path: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{path} must have 1 to 128 letters, digits, _ or -, got {name!r}", param=path
        )


def _choice(
    choice: Choice | None, names: Sequence[str]
) -> tuple[ToolChoice | None, frozenset[str] | None]:
    """How tools are chosen, None for no tools at all; and the names of those that may be."""
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
    if isinstance(choice, NamedTool):
        return ToolChoice.NAMED, frozenset({_known(choice, names, param)})
    allowed = choice.allowed_tools
    found = (
        _known(tool, names, f"{param}.allowed_tools.tools[{i}]")
        for i, tool in enumerate(allowed.tools)
    )
    kind = ToolChoice.REQUIRED if allowed.mode == "required" else ToolChoice.AUTO
    return kind, frozenset(found)


def _known(tool: NamedTool, names: Sequence[str], path: str) -> str:
    name = tool.function.name
    _check_name(name, f"{path}.function.name")
    if name not in names:
        raise InvalidRequest(f"{path}: there is no tool {name!r}", param=path)
    return name
