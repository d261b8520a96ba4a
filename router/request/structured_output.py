"""What a client may say about the form of an output: OpenAI's `response_format` and vLLM's
`structured_outputs` and `guided_*`, all read into one grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import InvalidRequest, Unsupported
from protocol.grammar import Grammar, GrammarKind
from router.request import fields as read
from router.request.fields import Fields

#: Any JSON object.
_OBJECT: Mapping[str, Any] = {"type": "object"}
_KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.LARK,
}
FIELDS = frozenset(
    {"response_format", "structured_outputs", *(f"guided_{name}" for name in _KINDS)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A grammar and the name of the field that asked for it."""

    grammar: Grammar
    param: str


def parse_structured(fields: Fields) -> StructuredOutput | None:
    """What the output must look like, if anything was said. Raises InvalidRequest naming the field;
    whether the grammar compiles is found out later."""
    asked = [
        found
        for found in (
            _response_format(fields.get("response_format")),
            _structured_outputs(fields.get("structured_outputs")),
            *(_one(name, fields.get(f"guided_{name}"), f"guided_{name}") for name in _KINDS),
        )
        if found is not None
    ]
    if len(asked) > 1:
        raise InvalidRequest(
            f"{asked[0].param} and {asked[1].param} both say what the output must look like; "
            "give one",
            param=asked[1].param,
        )
    if asked and fields.get("ignore_eos"):
        raise InvalidRequest(
            f"ignore_eos cannot be combined with {asked[0].param}: the output ends where its form "
            "does",
            param="ignore_eos",
        )
    return asked[0] if asked else None


def _response_format(value: object) -> StructuredOutput | None:
    if value is None:
        return None
    form = read.as_object(value, "response_format")
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        if isinstance(kind, str):
            raise Unsupported(
                f"response_format.type {kind!r} is not supported", param="response_format.type"
            )
        raise read.wrong_type("response_format.type", "a string", kind)
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _check_names(form, known, "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return _json(_OBJECT, "response_format")
    param = "response_format.json_schema"
    if form.get("json_schema") is None:
        raise InvalidRequest(f"{param} is required", param=param)
    described = read.as_object(form["json_schema"], param)
    _check_names(described, {"name", "description", "schema", "strict"}, param)
    if described.get("name") is None:
        raise InvalidRequest(f"{param}.name is required", param=f"{param}.name")
    for name in ("name", "description"):
        read.as_text(described.get(name) or "", f"{param}.{name}")
    # Either way the output follows the schema.
    read.as_boolean(described.get("strict"), f"{param}.strict")
    schema = described.get("schema")
    return _json(_OBJECT if schema is None else schema, f"{param}.schema")


def _structured_outputs(value: object) -> StructuredOutput | None:
    if value is None:
        return None
    form = read.as_object(value, "structured_outputs")
    _check_names(form, {*_KINDS, "json_object"}, "structured_outputs")
    asked = [_one(name, form.get(name), f"structured_outputs.{name}") for name in _KINDS]
    if form.get("json_object"):
        asked.append(_json(_OBJECT, "structured_outputs.json_object"))
    found = [one for one in asked if one is not None]
    if len(found) != 1:
        raise InvalidRequest(
            f"structured_outputs needs exactly one of {', '.join(_KINDS)}, json_object",
            param="structured_outputs",
        )
    return found[0]


def _one(name: str, value: object, param: str) -> StructuredOutput | None:
    if value is None:
        return None
    if name == "json":
        return _json(value, param)
    if name == "choice":
        choices = [read.as_text(item, param) for item in read.as_array(value, param)]
        source = json.dumps(choices, ensure_ascii=False)
    else:
        source = read.as_text(value, param)
    return StructuredOutput(grammar=Grammar(kind=_KINDS[name], source=source), param=param)


def _json(schema: object, param: str) -> StructuredOutput:
    """A JSON Schema, as an object or as its text."""
    if isinstance(schema, str):
        source = read.as_text(schema, param)
        if source.strip()[:1] not in ("{", ""):
            raise InvalidRequest(f"{param} must be the text of a JSON Schema object", param=param)
    elif isinstance(schema, Mapping):
        source = schema_text(schema, param)
    else:
        raise read.wrong_type(param, "a JSON Schema object", schema)
    return StructuredOutput(
        grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, source=source), param=param
    )


def schema_text(schema: Mapping[str, Any], param: str) -> str:
    """The text of a schema. Raises InvalidRequest when it is nested too deeply for one."""
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


def _check_names(value: Mapping[str, Any], known: set[str], path: str) -> None:
    for name, item in value.items():
        if name not in known and item is not None and item is not False:
            raise Unsupported(f"{path}.{name} is not supported", param=f"{path}.{name}")
