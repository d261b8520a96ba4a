"""The same request for both front ends: from the fields of a JSON body to a message of baton.v1."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict

from protocol.wire import inference_pb2 as pb


def to_message(fields: dict[str, Any]) -> pb.GenerateRequest:
    """A GenerateRequest with the fields of an HTTP body; not streamed unless it says so."""
    request = pb.GenerateRequest(stream=False)
    for name, value in fields.items():
        if name == "messages":
            request.chat.SetInParent()
            request.chat.messages.extend(_message(message) for message in value)
        elif name == "prompt":
            _set_prompt(request, value)
        elif name == "stop" and isinstance(value, str):
            request.stop.append(value)
        elif name == "stream_options":
            ParseDict(value, request.stream_options)
        elif isinstance(value, list):
            getattr(request, name).extend(value)
        elif name in ("response_format", "structured_outputs"):
            ParseDict(value, getattr(request, name))
            getattr(request, name).SetInParent()
        elif isinstance(value, dict):
            getattr(request, name).update(value)
        else:
            setattr(request, name, value)
    return request


def _set_prompt(request: pb.GenerateRequest, value: Any) -> None:
    if isinstance(value, str):
        request.prompt = value
    elif not value or isinstance(value[0], int):
        request.prompt_token_ids.SetInParent()
        request.prompt_token_ids.ids.extend(value)
    else:
        request.prompts.prompts.extend(_prompt(item) for item in value)


def _prompt(value: Any) -> pb.Prompt:
    if isinstance(value, str):
        return pb.Prompt(text=value)
    return pb.Prompt(token_ids=pb.TokenIds(ids=value))


def _message(fields: dict[str, Any]) -> pb.Message:
    message = pb.Message(role=fields.get("role", ""))
    content = fields.get("content")
    if isinstance(content, str):
        message.content = content
    elif content is not None:
        for part in content:
            message.parts.add(**part)
    if "name" in fields:
        message.name = fields["name"]
    for call in fields.get("tool_calls", ()):
        message.tool_calls.add(id=call["id"], **call["function"])
    return message
