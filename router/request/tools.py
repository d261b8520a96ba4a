"""`tools`, `tool_choice` and `parallel_tool_calls` of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from protocol.errors import InvalidRequest, Unsupported
from router.request import fields as read
from router.request.fields import Fields
from router.request.structured_output import schema_text

MAX_TOOLS = 128
FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: What a function without `parameters` takes.
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolChoice(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"  # as it likes
    REQUIRED = "required"  # at least one
    NAMED = "named"  # exactly the one that was named


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function. `schema` is the text of the JSON Schema of its arguments, `definition` what chat
    templates are given."""

    name: str
    schema: str
    definition: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request and how they are to be used. `callable_tools` are those that a forced
    call may name."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    named: str | None
    parallel: bool

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """All of them, or the one that was named."""
        if self.named is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.named)

    @property
    def definitions(self) -> list[Mapping[str, Any]]:
        """What chat templates are given."""
        return [tool.definition for tool in self.tools]


def parse_tools(fields: Fields) -> ToolUse | None:
    """The tools that the model may use; None without any. Raises InvalidRequest naming the field.

    With `tool_choice: "none"` the model is not told of the tools.
    """
    value = fields.get("tools")
    items = [] if value is None else read.as_array(value, "tools")
    read.check_count(items, MAX_TOOLS, "tools")
    tools = tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(items))
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequest(
                f"tools[{i}].function.name {name!r} is there twice",
                param=f"tools[{i}].function.name",
            )
    parallel = read.boolean(fields, "parallel_tool_calls")
    choice = _choice(fields.get("tool_choice"), names)
    if choice is None or not tools:
        return None
    kind, named = choice
    if kind is not ToolChoice.AUTO and fields.get("ignore_eos"):
        raise InvalidRequest(
            "ignore_eos cannot be combined with tool_choice: the output ends with the calls",
            param="ignore_eos",
        )
    return ToolUse(tools=tools, choice=kind, named=named, parallel=parallel is not False)


def _tool(value: object, path: str) -> Tool:
    tool = read.as_object(value, path)
    function = _function(tool, path)
    path = f"{path}.function"
    for name, item in function.items():
        if name not in ("name", "description", "parameters", "strict") and item is not None:
            raise Unsupported(f"{path}.{name} is not supported", param=f"{path}.{name}")
    name = _checked_name(function.get("name"), f"{path}.name")
    described = {"name": name}
    if function.get("description") is not None:
        described["description"] = read.as_text(function["description"], f"{path}.description")
    read.as_boolean(function.get("strict"), f"{path}.strict")  # either way it is
    parameters = function.get("parameters")
    schema = _NOTHING if parameters is None else read.as_object(parameters, f"{path}.parameters")
    read.check_depth(schema, f"{path}.parameters")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"{path}.parameters.type must be 'object'", param=f"{path}.parameters.type"
        )
    return Tool(
        name=name,
        # Calls have objects for arguments, whatever else the schema would allow.
        schema=schema_text({**schema, "type": "object"}, f"{path}.parameters"),
        definition={"type": "function", "function": {**described, "parameters": schema}},
    )


def _function(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise read.wrong_type(f"{path}.type", '"function"', kind)
    if kind != "function":
        raise Unsupported(f"{path}: tools of type {kind!r} are not supported", param=f"{path}.type")
    for name, item in tool.items():
        if name not in ("type", "function") and item is not None:
            raise Unsupported(f"{path}.{name} is not supported", param=f"{path}.{name}")
    if tool.get("function") is None:
        raise InvalidRequest(f"{path}.function is required", param=f"{path}.function")
    return read.as_object(tool["function"], f"{path}.function")


def _checked_name(value: object, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path} is required", param=path)
    name = read.as_text(value, path)
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{path} must have 1 to 64 letters, digits, _ or -, got {name!r}", param=path
        )
    return name


def _choice(value: object, names: list[str]) -> tuple[ToolChoice, str | None] | None:
    """How tools are chosen, and the name of the forced one; None for no tools at all."""
    param = "tool_choice"
    if value is None or value == "auto":
        return ToolChoice.AUTO, None
    if value == "none":
        return None
    if not names:
        raise InvalidRequest("tool_choice needs tools", param=param)
    if value == "required":
        return ToolChoice.REQUIRED, None
    if isinstance(value, str):
        raise InvalidRequest(
            f"tool_choice must be none, auto, required or a function, got {value!r}", param=param
        )
    chosen = _function(read.as_object(value, param), param)
    name = _checked_name(chosen.get("name"), f"{param}.function.name")
    if name not in names:
        raise InvalidRequest(f"tool_choice: there is no tool {name!r}", param=param)
    return ToolChoice.NAMED, name
