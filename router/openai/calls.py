"""Tool calls in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.choice import Delta
from router.tools.parser import CallDelta


def delta_json(delta: Delta) -> dict[str, Any]:
    """The `delta` of a chat chunk: text, parts of calls, or neither."""
    fields: dict[str, Any] = {"content": delta.text} if delta.text else {}
    if delta.calls:
        fields["tool_calls"] = [_call_delta(call) for call in delta.calls]
    return fields


def _call_delta(call: CallDelta) -> dict[str, Any]:
    """One part of a call: `index` always, id and name in its first."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def calls_json(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """The whole calls of a choice."""
    calls: list[dict[str, Any]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.id is not None:
            function = {"name": call.name, "arguments": ""}
            calls.append({"id": call.id, "type": "function", "function": function})
        calls[call.index]["function"]["arguments"] += call.arguments
    return calls
