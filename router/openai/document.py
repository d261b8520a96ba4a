"""The OpenAPI document of the HTTP API (https://spec.openapis.org/oas/v3.1.0), made from the types
that requests are parsed into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from protocol.errors import ErrorCode
from protocol.sampling import MAX_STOP_TOKEN_IDS
from router.anthropic.request import CountTokensRequest, MessagesRequest
from router.request.body import Body
from router.request.endpoints import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.request.generate_request import GenerateRequest
from router.responses.request import INPUT_ITEMS, InputTokensRequest, ResponsesRequest

Schema = dict[str, Any]

_REQUESTS = (
    *(ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest),
    *(MessagesRequest, CountTokensRequest, ResponsesRequest, InputTokensRequest),
)


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
#: One server-sent event.
_EVENT = _object({"data": _TEXT}, "data")
_ERROR = _object(
    {
        "error": _object(
            {
                "message": _TEXT,
                "type": _TEXT,
                "param": _nullable(_TEXT),
                "code": {"enum": [*ErrorCode, "model_not_found"]},
            },
            *("message", "type", "param", "code"),
        )
    },
    "error",
)
_MESSAGES_ERROR = _object(
    {
        "type": {"const": "error"},
        "error": _object({"type": _TEXT, "message": _TEXT}, "type", "message"),
        "request_id": _TEXT,
    },
    *("type", "error", "request_id"),
)
_MESSAGE = _object(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": {"type": "array"},
        "stop_reason": _TEXT,
        "stop_sequence": _nullable(_TEXT),
        "usage": _object(
            {"input_tokens": _COUNT, "output_tokens": _COUNT}, "input_tokens", "output_tokens"
        ),
    },
    *("id", "type", "role", "model", "content", "stop_reason", "usage"),
)
_RESPONSE = _object(
    {
        "id": _TEXT,
        "object": {"const": "response"},
        "status": {"enum": ["completed", "incomplete", "queued", "in_progress", "failed"]},
        "model": _TEXT,
        "output": {"type": "array"},
    },
    *("id", "object", "created_at", "status", "model", "output", "usage"),
)
_INPUT_TOKENS = _object(
    {"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT},
    *("object", "input_tokens"),
)
_RESPONSE_ID = {"name": "id", "in": "path", "required": True, "schema": _TEXT}
_TOKEN_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_USAGE = _object(dict.fromkeys(_TOKEN_COUNTS, _COUNT), *_TOKEN_COUNTS)
_MODEL = _object(
    {"id": _TEXT, "object": {"const": "model"}}, *("id", "object", "created", "owned_by")
)
_MODELS = _object({"data": {"type": "array", "items": _MODEL}}, "object", "data")
_TOKENS = _object(
    {"tokens": {"type": "array", "items": _COUNT}, "count": _COUNT, "max_model_len": _COUNT},
    *("tokens", "count", "max_model_len"),
)
_MODEL_NAME = {"name": "model", "in": "path", "required": True, "schema": _TEXT}


def openapi_document(
    *, version: str, names: Sequence[str], context: int, vocab_size: int, strict: bool
) -> Schema:
    """The document that /openapi.json serves, for a model with these names, a context of so many
    tokens and such a vocabulary; if `strict`, fields that are not in it are refused."""
    schemas = _request_schemas(names, context, vocab_size, strict=strict)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": {
            "/v1/chat/completions": _generate(ChatRequest, "chat.completion"),
            "/v1/completions": _generate(CompletionRequest, "text_completion"),
            "/v1/responses": _streamed(_with_body(ResponsesRequest, _RESPONSE)),
            "/v1/responses/input_tokens": {"post": _with_body(InputTokensRequest, _INPUT_TOKENS)},
            "/v1/responses/{id}": {
                "get": _operation(_RESPONSE),
                "delete": _operation({"type": "object"}),
                "parameters": [_RESPONSE_ID],
            },
            "/v1/responses/{id}/cancel": {
                "post": _operation(_RESPONSE),
                "parameters": [_RESPONSE_ID],
            },
            "/v1/responses/{id}/input_items": {
                "get": _operation({"type": "object"}),
                "parameters": [_RESPONSE_ID],
            },
            "/v1/messages": _streamed(_with_body(MessagesRequest, _MESSAGE, "MessagesError")),
            "/v1/messages/count_tokens": {
                "post": _with_body(
                    CountTokensRequest,
                    _object({"input_tokens": _COUNT}, "input_tokens"),
                    "MessagesError",
                )
            },
            "/v1/models": {"get": _operation(_MODELS)},
            "/v1/models/{model}": {"get": _operation(_MODEL) | {"parameters": [_MODEL_NAME]}},
            "/tokenize": {"post": _with_body(TokenizeRequest, _TOKENS)},
            "/detokenize": {"post": _with_body(DetokenizeRequest, _text_field("prompt"))},
            "/health": {"get": _operation(_text_field("status"))},
            "/ready": {"get": _operation(_text_field("status"))},
            "/version": {"get": _operation(_text_field("version"))},
            "/metrics/targets": {"get": _operation({"type": "array"})},
            "/metrics": {"get": _operation(_TEXT, media="text/plain")},
            "/openapi.json": {"get": _operation({"type": "object"})},
        },
        "components": {"schemas": {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR} | schemas},
    }


def _request_schemas(
    names: Sequence[str], context: int, vocab_size: int, *, strict: bool
) -> dict[str, Schema]:
    """What a field may be, as far as its own value says: what depends on other fields or on the
    cluster is refused later."""
    _, schemas = msgspec.json.schema_components(
        (*_REQUESTS, *INPUT_ITEMS.values()), ref_template=_REFERENCE
    )
    ids = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
    }
    some_ids = ids | {"minItems": 1}
    one: Schema = {"anyOf": [_TEXT, some_ids]}
    many = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_PROMPTS}
    tokens = {"type": "integer", "minimum": 0, "maximum": context}
    of_the_model: dict[str, Schema] = {
        "model": {"enum": list(names)},
        "stop_token_ids": ids | {"maxItems": MAX_STOP_TOKEN_IDS},
        "tokens": ids,
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), tokens),
    }
    for kind in _REQUESTS:
        properties = schemas[kind.__name__]["properties"]
        for name in properties.keys() & of_the_model.keys():
            properties[name] = of_the_model[name]
    items = [{"$ref": _REFERENCE.format(name=kind.__name__)} for kind in INPUT_ITEMS.values()]
    for name in ("ResponsesRequest", "InputTokensRequest"):
        properties = schemas[name]["properties"]
        some_items = {"type": "array", "items": {"anyOf": items}, "minItems": 1}
        properties["input"] = {"anyOf": [_TEXT, some_items]}
        properties["tools"]["items"] = _object({"type": _TEXT}, "type")
        properties["tool_choice"] = {"anyOf": [{"enum": ["auto", "none"]}, {"type": "object"}]}
    limit = {"type": "integer", "minimum": 1}  # cut to what fits
    schemas["MessagesRequest"]["properties"]["max_tokens"] = limit
    prompt = {"anyOf": [_TEXT, some_ids, many]}
    schemas["CompletionRequest"]["properties"]["prompt"] = prompt
    neutral = {kind.__name__: kind.neutral for kind in _subclasses(Body)}
    for title, schema in schemas.items():
        _allow_null(schema, neutral.get(title, ()) if strict else None)
    return schemas


_REFERENCE = "#/components/schemas/{name}"


def _subclasses(kind: type[Body]) -> Iterator[type[Body]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _allow_null(schema: Schema, neutral: Sequence[Any] | None) -> None:
    """Null means unset; unknown fields may be anything, or only null or as neutral."""
    properties = schema.get("properties", {})
    for name in properties.keys() - set(schema.get("required", ())):
        properties[name] = _nullable(properties[name])
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = True if neutral is None else {"enum": [None, *neutral]}


def _generate(kind: type[GenerateRequest], name: str) -> Schema:
    answer = _object(
        {
            "id": _TEXT,
            "object": {"const": name},
            "created": {"type": "integer"},
            "model": _TEXT,
            "choices": {"type": "array", "minItems": 1},
            "usage": _USAGE,
        },
        *("id", "object", "created", "model", "choices", "usage"),
    )
    return _streamed(_with_body(kind, answer))


def _streamed(operation: Schema) -> Schema:
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return {"post": operation}


def _with_body(kind: type[Body], answer: Schema, error: str = "Error") -> Schema:
    body = {"$ref": _REFERENCE.format(name=kind.__name__)}
    content = {"application/json": {"schema": body}}
    return _operation(answer, error=error) | {"requestBody": {"required": True, "content": content}}


def _operation(answer: Schema, *, media: str = "application/json", error: str = "Error") -> Schema:
    errors = {"application/json": {"schema": {"$ref": _REFERENCE.format(name=error)}}}
    return {
        "responses": {
            "200": {"description": "the answer", "content": {media: {"schema": answer}}},
            "default": {"description": "an error", "content": errors},
        }
    }


def _text_field(name: str) -> Schema:
    return _object({name: _TEXT}, name)
