"""From messages of baton.v1 to typed requests: the fields that are set take the names and nesting
of JSON bodies and are parsed by the same table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protocol.errors import InvalidRequest
from protocol.wire import inference_pb2 as pb
from router.request.chat_messages import MAX_ITEMS, MAX_MESSAGES
from router.request.endpoints import DetokenizeRequest, TokenizeRequest
from router.request.generate_request import GenerateRequest, RequestKind
from router.request.parse import REQUESTS, parse_fields

#: Values of a field, or bytes of unknown fields, that are looked at one by one.
_MAX_VALUES = 1 << 16
#: Messages inside one request: each takes microseconds on the event loop.
_MAX_NESTED = MAX_MESSAGES + MAX_ITEMS
#: Repeated token ids, which may be millions: kept as they are.
_ID_FIELDS = ("ids", "tokens")

Fields = dict[str, Any]


def generate_request(message: pb.GenerateRequest) -> GenerateRequest:
    """The request in a message. Raises InvalidRequest naming the field."""
    kind = RequestKind.CHAT if message.HasField("chat") else RequestKind.COMPLETION
    return parse_fields({"stream": True} | _Converter().value(message, ""), REQUESTS[kind])


def tokenize_request(message: pb.TokenizeRequest) -> TokenizeRequest:
    return parse_fields(_Converter().value(message, ""), TokenizeRequest)


def detokenize_request(message: pb.DetokenizeRequest) -> DetokenizeRequest:
    """The same for Detokenize; no tokens are an empty array."""
    return parse_fields({"tokens": []} | _Converter().value(message, ""), DetokenizeRequest)


def check_known(message: Message) -> None:
    """Raise InvalidRequest when a newer client has set a field that this build does not know."""
    name = message.DESCRIPTOR.name
    if message.ByteSize() > _MAX_VALUES:  # listing millions of fields would take seconds
        known = type(message)()
        known.CopyFrom(message)
        known.DiscardUnknownFields()
        extra = message.ByteSize() - known.ByteSize()
        if extra > _MAX_VALUES:
            raise InvalidRequest(f"{name} has {extra} bytes of unknown fields", param=name)
    fields = UnknownFieldSet(message)
    unknown = sorted(fields[i].field_number for i in range(len(fields)))
    if unknown:
        raise InvalidRequest(
            f"{name} has unknown fields: {', '.join(map(str, unknown))}",
            param=f"{name}.{unknown[0]}",
        )


class _Converter:
    """Turns the messages of one request into values of JSON."""

    def __init__(self) -> None:
        self._num_nested = 0

    def value(self, message: Message, path: str) -> Any:
        check_known(message)
        fields = {
            field.name: self._field(field, value, f"{path}.{field.name}".removeprefix("."))
            for field, value in message.ListFields()
        }
        reshape = _RESHAPE.get(type(message))
        return fields if reshape is None else reshape(fields, path)

    def _field(self, field: FieldDescriptor, value: Any, path: str) -> Any:
        if field.is_repeated and field.name not in _ID_FIELDS:
            self._check_count(field, len(value), path)
        if field.message_type is None:
            return list(value) if field.is_repeated and field.name not in _ID_FIELDS else value
        if field.message_type.GetOptions().map_entry:
            return dict(value)
        path = path.removeprefix("chat.").removeprefix("chat")
        if field.is_repeated:
            return [self.value(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return self.value(value, path)

    def _check_count(self, field: FieldDescriptor, count: int, path: str) -> None:
        nested = field.message_type is not None
        self._num_nested += count if nested else 0
        if count > _MAX_VALUES or self._num_nested > _MAX_NESTED:
            raise InvalidRequest(f"{path} has too many values: {count}", param=path)


def _with_inputs(fields: Fields, _: str) -> Fields:
    for name in ("prompt_token_ids", "prompts"):
        if name in fields:
            fields["prompt"] = fields.pop(name)
    fields.update(fields.pop("chat", {}))
    if "chat_template_kwargs" in fields:
        name = "chat_template_kwargs"
        fields[name] = _json_value(fields[name], name)
    if "documents" in fields:
        texts = enumerate(fields["documents"])
        fields["documents"] = [_json_value(text, f"documents[{i}]") for i, text in texts]
    return fields


def _json_value(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"{param} is not valid JSON", param=param) from None


def _message(fields: Fields, path: str) -> Fields:
    if "parts" in fields:
        if "content" in fields:
            raise InvalidRequest(f"{path}: give content or parts", param=f"{path}.parts")
        fields["content"] = fields.pop("parts")
    return fields


def _tool_call(fields: Fields, _: str) -> Fields:
    function = {"name": fields.get("name", ""), "arguments": fields.get("arguments", "")}
    return {"id": fields.get("id", ""), "type": "function", "function": function}


def _tool(fields: Fields, path: str) -> Fields:
    if "parameters" in fields:
        param = f"{path}.function.parameters"
        fields["parameters"] = _json_value(fields["parameters"], param)
    return {"type": "function", "function": fields}


def _tool_choice(fields: Fields, _: str) -> str | Fields:
    if "function" in fields:
        return {"type": "function", "function": {"name": fields["function"]}}
    mode: str | Fields = fields.get("mode", {})
    return mode


#: Messages that JSON writes differently.
_RESHAPE: dict[type[Message], Callable[[Fields, str], Any]] = {
    pb.GenerateRequest: _with_inputs,
    pb.TokenizeRequest: _with_inputs,
    pb.TokenIds: lambda fields, _: fields.get("ids", []),
    pb.PromptBatch: lambda fields, _: fields.get("prompts", []),
    pb.Prompt: lambda fields, _: next(iter(fields.values()), None),
    pb.Message: _message,
    pb.Tool: _tool,
    pb.ToolCall: _tool_call,
    pb.ToolChoice: _tool_choice,
}
