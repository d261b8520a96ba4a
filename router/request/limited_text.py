"""Free text within limits: with tags in it (structural tags), without some words, of some tokens.

Its grammar depends on the model's special tokens (router.text.free_text).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest, invalid_field
from router.request.body import Body, Int64

#: A JSON Schema, as an object or as its text.
Schema = dict[str, Any] | str

MAX_TAGS = 512
_Text = Annotated[str, Meta(min_length=1, max_length=1024)]
_End = Annotated[str, Meta(max_length=1024)]
_Triggers = Annotated[Sequence[_Text], Meta(min_length=1, max_length=MAX_TAGS)]
BadWords = Annotated[
    Sequence[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=256)
]
AllowedTokenIds = Annotated[Sequence[Int64], Meta(min_length=1, max_length=1 << 14)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A part of a text: from `begin`, which starts with `trigger`, to `end`, with JSON of this
    schema or what matches this regular expression in between."""

    trigger: str
    begin: str
    end: str
    schema: str | None
    regex: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedText:
    """Where the trigger of a tag comes up, one of its tags has to follow; none of `bad_words` is in
    the text; only `allowed_ids` are sampled (empty: all). required: there is a tag; single: the
    first tag ends the text."""

    tags: tuple[Tag, ...] = ()
    required: bool = False
    single: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_ids: tuple[int, ...] = ()

    @property
    def schemas(self) -> list[str]:
        """The JSON Schemas of the tags, as text."""
        return [tag.schema for tag in self.tags if tag.schema is not None]


class TagStructure(Body):
    """A tag around JSON."""

    begin: _Text
    schema: Schema | None = None
    end: _End = ""


class TagContent(Body):
    """What is inside a tag."""

    type: Literal["json_schema", "regex"]
    json_schema: Schema | None = None
    pattern: str | None = None


class TagForm(Body):
    """A tag in xgrammar's words."""

    begin: _Text
    content: TagContent
    end: _End = ""
    type: Literal["tag"] = "tag"


class TriggeredTags(Body):
    """Text with tags in it, in xgrammar's words."""

    neutral = (False,)

    type: Literal["triggered_tags"]
    triggers: _Triggers
    tags: Annotated[Sequence[TagForm], Meta(min_length=1, max_length=MAX_TAGS)]
    at_least_one: bool = False
    stop_after_first: bool = False


class StructuralTag(Body):
    """Text with tags in it, as vLLM and SGLang take it: `structures` and `triggers`, or xgrammar's
    `format`."""

    neutral = (False,)

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[Sequence[TagStructure], Meta(max_length=MAX_TAGS)] = ()
    triggers: _Triggers | None = None
    format: TriggeredTags | None = None

    def text(self, path: str) -> LimitedText:
        """Raises InvalidRequest naming the field, below `path`."""
        if self.format is not None:
            form, place = self.format, f"{path}.format.tags"
            tags = [_tag(t, form.triggers, f"{place}[{i}]") for i, t in enumerate(form.tags)]
            single = form.stop_after_first
            return LimitedText(tags=tuple(tags), required=form.at_least_one, single=single)
        for name, value in (("structures", self.structures), ("triggers", self.triggers)):
            if not value:
                raise InvalidRequest(f"{path}.{name} is required", param=f"{path}.{name}")
        tags = [
            _tag(_as_form(structure), self.triggers or (), f"{path}.structures[{i}]")
            for i, structure in enumerate(self.structures)
        ]
        return LimitedText(tags=tuple(tags))


def parsed_tag(text: str, param: str) -> StructuralTag:
    """The structural tag in a text of JSON. Raises InvalidRequest naming the field."""
    try:
        return _TAG.decode(text)
    except msgspec.ValidationError as error:
        inner = invalid_field(error)
        message = inner.message.replace(inner.param or "", f"{param}.{inner.param}", 1)
        raise InvalidRequest(message, param=f"{param}.{inner.param}") from None
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"{param} is not valid JSON", param=param) from None


_TAG = msgspec.json.Decoder(StructuralTag)


def _as_form(structure: TagStructure) -> TagForm:
    content = TagContent(type="json_schema", json_schema=structure.schema or {})
    return TagForm(begin=structure.begin, content=content, end=structure.end)


def _tag(form: TagForm, triggers: Sequence[str], path: str) -> Tag:
    """Raises InvalidRequest naming the field."""
    fitting = [trigger for trigger in triggers if form.begin.startswith(trigger)]
    if not fitting:
        raise InvalidRequest(f"{path}.begin starts with no trigger", param=f"{path}.begin")
    content = form.content
    name = "json_schema" if content.type == "json_schema" else "pattern"
    if getattr(content, name) is None:
        param = f"{path}.content.{name}"
        raise InvalidRequest(f"{param} is required", param=param)
    schema, trigger = content.json_schema, max(fitting, key=len)
    if content.type == "regex":
        pattern = content.pattern
        return Tag(trigger=trigger, begin=form.begin, end=form.end, schema=None, regex=pattern)
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{path}: the schema is nested too deeply", param=path) from None
    return Tag(trigger=trigger, begin=form.begin, end=form.end, schema=text, regex=None)
