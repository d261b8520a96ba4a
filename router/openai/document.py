"""The OpenAPI document of the HTTP door (https://spec.openapis.org/oas/v3.1.0), with the bounds
that requests are checked with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.errors import ErrorCode
from protocol.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_SEED, MAX_STOP_TOKEN_IDS
from router.request.generate_request import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SERVED,
    RequestKind,
)

Schema = dict[str, Any]


def _nullable(schema: Schema) -> Schema:
    """A schema that null also fits: everywhere, null means unset."""
    return {"anyOf": [schema, {"type": "null"}]}


def _number(low: float | None = None, high: float | None = None) -> Schema:
    return _nullable({"type": "number"} | _bounds(low, high))


def _integer(low: int | None = None, high: int | None = None) -> Schema:
    return _nullable({"type": "integer"} | _bounds(low, high))


def _bounds(low: float | None, high: float | None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


_BOOLEAN = _nullable({"type": "boolean"})
_TEXT = _nullable({"type": "string"})
_OBJECT: Schema = {"type": "object"}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_PART = _object({"type": {"const": "text"}, "text": {"type": "string"}}, "type", "text")
_CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


def _body(properties: dict[str, Schema], *required: str) -> Schema:
    """What a client sends. Unknown fields are refused unless null."""
    return _object(properties, *required) | {"additionalProperties": {"type": "null"}}


def _message(roles: Sequence[str], *required: str, **properties: Schema) -> Schema:
    """A message of one of these roles."""
    fields = {"role": {"enum": list(roles)}, "name": _TEXT} | properties
    return _body(fields, "role", *required)


_CALLS: Schema = {"type": "array", "items": _OBJECT}
_MESSAGE: Schema = {
    "anyOf": [
        _message(["system", "developer", "user"], "content", content=_CONTENT),
        _message(["assistant"], content=_nullable(_CONTENT), tool_calls=_nullable(_CALLS)),
        _message(["tool"], "content", "tool_call_id", content=_CONTENT, tool_call_id=_TEXT),
    ]
}

#: What a field may be, as far as its own value says: {} is filled in for the model. What depends on
#: other fields or on the cluster is refused later.
FIELDS: dict[str, Schema] = {
    "model": {},
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "prompt": {},
    "temperature": _number(0, 100),
    "top_p": _nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "top_k": _integer(-1, 2**31 - 1),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "logit_bias": _nullable(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,19}$"},
            "additionalProperties": {"type": "number"},
            "maxProperties": MAX_LOGIT_BIASES,
        }
    ),
    "seed": _integer(0, MAX_SEED),
    "n": _integer(1, MAX_CHOICES),
    "max_tokens": {},
    "max_completion_tokens": {},
    "min_tokens": {},
    "stop": _nullable({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
    "stop_token_ids": {},
    "ignore_eos": _BOOLEAN,
    "stream": _BOOLEAN,
    "stream_options": _nullable(
        {
            "type": "object",
            "properties": {"include_usage": _BOOLEAN, "continuous_usage_stats": _BOOLEAN},
        }
    ),
    "user": _TEXT,
    "cache_salt": _nullable({"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS}),
    "priority": _integer(),
    "service_tier": _TEXT,
    "timeout": _nullable({"type": "number", "exclusiveMinimum": 0}),
    "timeline": _BOOLEAN,
    "return_token_ids": _BOOLEAN,
    "logprobs": _nullable({"anyOf": [{"type": "boolean"}, {"type": "integer"}]}),
    "top_logprobs": _integer(0, MAX_LOGPROBS),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS),
    "echo": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "include_stop_str_in_output": _BOOLEAN,
    "response_format": _nullable(_OBJECT),
    "structured_outputs": _nullable(_OBJECT),
    "guided_json": _nullable({"anyOf": [_OBJECT, {"type": "string"}]}),
    "guided_regex": _TEXT,
    "guided_choice": _nullable({"type": "array"}),
    "guided_grammar": _TEXT,
    "tools": _nullable({"type": "array"}),
    "tool_choice": _nullable({"anyOf": [{"type": "string"}, _OBJECT]}),
    "parallel_tool_calls": _BOOLEAN,
}

_ERROR = _object(
    {
        "error": _object(
            {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT,
                "code": {"enum": [*ErrorCode, "model_not_found"]},
            },
            *("message", "type", "param", "code"),
        )
    },
    "error",
)
_USED = ("prompt_tokens", "completion_tokens", "total_tokens")
_USAGE = _object(dict.fromkeys(_USED, _COUNT), *_USED)
_MODEL = _object(
    {"id": {"type": "string"}, "object": {"const": "model"}},
    *("id", "object", "created", "owned_by"),
)
_MODELS = _object({"data": {"type": "array", "items": _MODEL}}, "object", "data")
_TOKENS = _object(
    {"tokens": {"type": "array", "items": _COUNT}, "count": _COUNT, "max_model_len": _COUNT},
    *("tokens", "count", "max_model_len"),
)
_MODEL_NAME = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}


def openapi_document(
    *, version: str, names: Sequence[str], context: int, vocab_size: int
) -> Schema:
    """The document that /openapi.json serves, for a model with these names, a context of so many
    tokens and such a vocabulary."""
    ids = _ids(vocab_size)
    fields = FIELDS | {
        "model": _nullable({"enum": list(names)}),
        "prompt": _prompts(ids),
        "stop_token_ids": _nullable(ids | {"minItems": 0, "maxItems": MAX_STOP_TOKEN_IDS}),
        "max_tokens": _integer(0, context),
        "max_completion_tokens": _integer(0, context),
        "min_tokens": _integer(0, context),
    }
    tokenize = {name: fields[name] for name in ("model", "tools", "tool_choice")} | {
        "prompt": _TEXT,
        "messages": _nullable(fields["messages"]),
        "add_special_tokens": _BOOLEAN,
    }
    detokenize = {"model": fields["model"], "tokens": ids | {"minItems": 0}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": {
            "/v1/chat/completions": _generate(RequestKind.CHAT, "messages", fields),
            "/v1/completions": _generate(RequestKind.COMPLETION, "prompt", fields),
            "/v1/models": {"get": _operation(_MODELS)},
            "/v1/models/{model}": {"get": _operation(_MODEL) | {"parameters": [_MODEL_NAME]}},
            "/tokenize": {"post": _text_operation(_body(tokenize), _TOKENS)},
            "/detokenize": {
                "post": _text_operation(_body(detokenize, "tokens"), _text_field("prompt"))
            },
            "/health": {"get": _operation(_text_field("status"))},
            "/ready": {"get": _operation(_text_field("status"))},
            "/version": {"get": _operation(_text_field("version"))},
            "/metrics/targets": {"get": _operation({"type": "array"})},
            "/metrics": {"get": _operation({"type": "string"}, media="text/plain")},
            "/openapi.json": {"get": _operation(_OBJECT)},
        },
        "components": {"schemas": {"Error": _ERROR}},
    }


def _generate(kind: RequestKind, required: str, fields: dict[str, Schema]) -> Schema:
    body = _body({name: fields.get(name, {}) for name in sorted(SERVED[kind])}, required)
    name = "chat.completion" if kind is RequestKind.CHAT else "text_completion"
    answer = _object(
        {
            "id": {"type": "string"},
            "object": {"const": name},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "minItems": 1},
            "usage": _USAGE,
        },
        *("id", "object", "created", "model", "choices", "usage"),
    )
    operation = _text_operation(body, answer)
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {"post": operation}


def _text_operation(body: Schema, answer: Schema) -> Schema:
    content = {"application/json": {"schema": body}}
    return _operation(answer) | {"requestBody": {"required": True, "content": content}}


def _operation(answer: Schema, *, media: str = "application/json") -> Schema:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "responses": {
            "200": {"description": "the answer", "content": {media: {"schema": answer}}},
            "default": {"description": "an error", "content": error},
        }
    }


def _text_field(name: str) -> Schema:
    return _object({name: {"type": "string"}}, name)


def _ids(vocab_size: int) -> Schema:
    item = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    return {"type": "array", "items": item, "minItems": 1}


def _prompts(ids: Schema) -> Schema:
    one = {"anyOf": [{"type": "string"}, ids]}
    many = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_PROMPTS}
    return {"anyOf": [{"type": "string"}, ids, many]}
