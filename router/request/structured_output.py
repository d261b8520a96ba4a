"""The form of an output: OpenAI's `response_format`, vLLM's `structured_outputs` and
`guided_*`, `bad_words`, `allowed_token_ids`, all turned into one form."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from protocol.errors import InvalidRequest, Unsupported
from protocol.sampling import Grammar, GrammarKind
from router.request.body import Body
from router.request.limited_text import LimitedText, Schema, StructuralTag, parsed_tag

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.LARK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A form and the name of the field that asked for it."""

    form: Grammar | LimitedText
    param: str


class JsonSchema(Body):
    """A named schema. The output follows it whether `strict` or not."""

    neutral = (False,)

    name: str
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class ResponseFormat(StructuralTag):
    """OpenAI's way to say it; a structural tag is vLLM's and SGLang's, a schema beside
    `json_object` other servers'."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]  # type: ignore[assignment]
    json_schema: JsonSchema | None = None
    schema: Schema | None = None

    def structured(self) -> StructuredOutput | None:
        """The grammar; None for any text."""
        for name, kind in (("json_schema", "json_schema"), ("schema", "json_object")):
            if self.type != kind and getattr(self, name) is not None:
                param = f"response_format.{name}"
                raise Unsupported(f"{param} is not supported with {self.type}", param=param)
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            form = self.text("response_format")
            return StructuredOutput(form=form, param="response_format")
        if self.type == "json_object":
            if self.schema is None:
                return _structured("json", _ANY_OBJECT, "response_format")
            return _structured("json", self.schema, "response_format.schema")
        param = "response_format.json_schema"
        if self.json_schema is None:
            raise InvalidRequest(f"{param} is required", param=param)
        schema = self.json_schema.schema
        return _structured("json", _ANY_OBJECT if schema is None else schema, f"{param}.schema")


class StructuredOutputs(Body):
    """vLLM's way to say it; exactly one field is needed."""

    neutral = (False,)

    json: Schema | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | str | None = None

    def structured(self) -> StructuredOutput:
        found = self.grammars("structured_outputs.")
        if self.structural_tag is not None:
            found.append(self._tagged(self.structural_tag, "structured_outputs.structural_tag"))
        if self.json_object:
            found.append(_structured("json", _ANY_OBJECT, "structured_outputs.json_object"))
        if len(found) != 1:
            raise InvalidRequest(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, json_object, "
                "structural_tag",
                param="structured_outputs",
            )
        return found[0]

    @staticmethod
    def _tagged(tag: StructuralTag | str, param: str) -> StructuredOutput:
        if isinstance(tag, str):
            tag = parsed_tag(tag, param)
        return StructuredOutput(form=tag.text(param), param=param)

    def grammars(self, prefix: str) -> list[StructuredOutput]:
        """The grammar of each field that is set, named with this prefix."""
        values = {name: getattr(self, name) for name in _KINDS}
        return [
            _structured(name, value, prefix + name)
            for name, value in values.items()
            if value is not None
        ]


def _structured(name: str, value: Schema | Sequence[str], param: str) -> StructuredOutput:
    if not isinstance(value, str):
        try:
            value = json_text.dumps(value, ensure_ascii=False)
        except RecursionError:
            raise InvalidRequest(f"{param} is nested too deeply", param=param) from None
    elif name == "json" and value.strip()[:1] not in ("{", ""):
        raise InvalidRequest(f"{param} must be the text of a JSON Schema object", param=param)
    return StructuredOutput(form=Grammar(kind=_KINDS[name], source=value), param=param)


def limits(bad_words: Sequence[str], allowed_ids: Sequence[int]) -> list[StructuredOutput]:
    """What the fields of these names ask for."""
    found = {
        "bad_words": LimitedText(bad_words=tuple(bad_words)),
        "allowed_token_ids": LimitedText(allowed_ids=tuple(allowed_ids)),
    }
    nothing = LimitedText()
    return [
        StructuredOutput(form=form, param=param) for param, form in found.items() if form != nothing
    ]
