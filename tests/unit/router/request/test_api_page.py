"""One table of fields: docs/api.md and the .proto agree with the types of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.descriptor import FieldDescriptor

from protocol.errors import STATUSES, ErrorCode
from protocol.wire import inference_pb2 as pb
from router.request.body import HARMLESS, HINTS, UNSERVED
from router.request.endpoints import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text(encoding="utf-8")
FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
#: Fields that protobuf divides by type or nests.
INPUTS = {"messages", "prompt", "chat", "prompts", "prompt_token_ids"}
#: Message of baton.v1 -> the requests it is parsed into.
MESSAGES = {
    pb.GenerateRequest: (ChatRequest, CompletionRequest),
    pb.TokenizeRequest: (TokenizeRequest,),
    pb.DetokenizeRequest: (DetokenizeRequest,),
}
#: Texts of JSON objects in protobuf.
JSON_TEXTS = {"chat_template_kwargs": "object", "documents": "array"}
SCALARS = {
    FieldDescriptor.TYPE_DOUBLE: "number",
    FieldDescriptor.TYPE_INT64: "integer",
    FieldDescriptor.TYPE_BOOL: "boolean",
    FieldDescriptor.TYPE_STRING: "string",
}


@pytest.mark.parametrize("field", sorted(FIELDS | UNSERVED.keys() | HINTS.keys() | HARMLESS))
def test_every_field_is_on_the_page(field: str) -> None:
    assert f"`{field}`" in PAGE


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_is_on_the_page(code: ErrorCode) -> None:
    assert f"| `{code.value}` | {STATUSES[code].http} | {STATUSES[code].grpc} |" in PAGE


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.DESCRIPTOR.name)
def test_json_and_protobuf_have_the_same_fields(message: type) -> None:
    in_proto = {field.name for field in message.DESCRIPTOR.fields}
    in_json = {name for request in MESSAGES[message] for name in request.__struct_fields__}
    assert in_json - INPUTS == in_proto - INPUTS - (UNSERVED.keys() - in_json)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.DESCRIPTOR.name)
def test_json_and_protobuf_fields_have_the_same_types(message: type) -> None:
    in_json = {name for request in MESSAGES[message] for name in request.__struct_fields__}
    for field in message.DESCRIPTOR.fields:
        if field.name in INPUTS | (UNSERVED.keys() - in_json):
            continue
        kinds = json_types(MESSAGES[message], field.name)
        if field.name in JSON_TEXTS:
            assert field.type == FieldDescriptor.TYPE_STRING
            assert JSON_TEXTS[field.name] in kinds
            continue
        if field.is_repeated and not is_map(field):
            assert "array" in kinds, field.name
        elif field.message_type is not None:
            assert "object" in kinds, field.name
        else:
            assert SCALARS[field.type] in kinds, field.name


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def json_types(requests: tuple[type, ...], name: str) -> set[str]:
    """The types that a field may have in JSON."""
    _, schemas = msgspec.json.schema_components(requests)
    found: set[str] = set()
    for request in requests:
        schema: dict[str, Any] = schemas[request.__name__]["properties"].get(name, {})
        for option in schema.get("anyOf", [schema]):
            found.add(option.get("type", "string" if "enum" in option else "object"))
    return found
