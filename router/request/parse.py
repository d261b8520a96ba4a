"""From JSON bodies and gRPC messages to typed requests. Every error names its field.

A body is decoded straight into its type. Only when that fails is it read again as plain JSON: null,
which means unset, and values that ask for nothing are removed, and what is still wrong then is the
error. Fields that are unknown, or that change nothing here, are left out; their names go into the
list `ignored`. Without that list they are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import inspect
from msgspec.structs import force_setattr

from protocol.codec import building
from protocol.errors import InvalidRequest, Unsupported, invalid_field
from router.offload import loads_in_pieces, refuse_constant
from router.request.body import ANYWHERE, HARMLESS, HINTS, INSTEAD, UNSERVED, Body, is_neutral
from router.request.chat_messages import ChatRole
from router.request.endpoints import ChatRequest, CompletionRequest, Effort, check_num_prompts
from router.request.generate_request import GenerateRequest, RequestKind

R = TypeVar("R", bound=Body)

#: The type of a request of each kind.
REQUESTS: dict[RequestKind, type[GenerateRequest]] = {
    RequestKind.CHAT: ChatRequest,
    RequestKind.COMPLETION: CompletionRequest,
}
#: Larger bodies are decoded in pieces, so that other threads run meanwhile.
LARGE_BYTES = 1 << 17
#: Fields of token ids, which may be many.
_ID_FIELDS = ("prompt", "tokens")
#: Types of the values of plain JSON.
_JSON = {str, int, float, bool, list, dict, type(None)}
_HOLD_TEXT = {str, list, dict}
#: Of fields whose errors list what they may be.
_CHOICES = {
    "role": (*ChatRole, "developer"),
    "reasoning_effort": get_args(Effort),
    "truncation": ("auto", "disabled"),
}


def parse_json(body: bytes, kind: type[R], ignored: list[str] | None = None) -> R:
    """The request in a JSON body. Raises InvalidRequest naming the first wrong field."""
    if len(body) <= LARGE_BYTES:
        decoder: msgspec.json.Decoder[R] = _decoder(kind)
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    return parse_fields(_load_object(body), kind, ignored)


def parse_fields(fields: Mapping[str, Any], kind: type[R], ignored: list[str] | None = None) -> R:
    """The request with these fields, named as in JSON. Raises InvalidRequest as above.

    Sequences other than lists in `prompt` and `tokens` are token ids and are kept as they are.
    """
    fields = _served(fields, kind, ignored)
    ids = {name: fields[name] for name in _ID_FIELDS if _holds_ids(fields.get(name))}
    prompt = fields.get("prompt")
    if kind is CompletionRequest and isinstance(prompt, list) and list in set(map(type, prompt)):
        check_num_prompts(prompt)  # converting thousands of arrays takes long
    fields |= {name: _stand_in(value) for name, value in ids.items()}
    try:
        request = msgspec.convert(_shape(kind).cleaned(fields, "", ignored), kind)
    except msgspec.ValidationError as error:
        raise _named(invalid_field(error), fields) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    for name, value in ids.items():
        force_setattr(request, name, value)
    return request


def parse_object(value: Any, kind: type[R], path: str, ignored: list[str] | None) -> R:
    """One object of a request, at `path`. Raises InvalidRequest naming its field."""
    try:
        return msgspec.convert(_shape(kind).cleaned(value, path, ignored), kind)
    except msgspec.ValidationError as error:
        inner = _named(invalid_field(error), {"tools": True})
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply", param=path) from None
    param = path if inner.param == "body" else f"{path}.{inner.param}"
    message = inner.message.replace(inner.param or "", param, 1)
    raise type(inner)(message, param=param)


@cache
def _decoder(kind: type[R]) -> msgspec.json.Decoder[R]:
    with building:
        return msgspec.json.Decoder(kind)


@cache
def _shape(kind: type[Body]) -> _Shape:
    return _Shape(inspect.type_info(_decoder(kind).type))  # msgspec knows it before it converts


def _load_object(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode()
        if len(body) > LARGE_BYTES:
            value = loads_in_pieces(text)
        else:
            value = json.loads(text, parse_constant=refuse_constant)
        if "\\" in text and ("\\ud" in text or "\\uD" in text):
            _check_unicode(value, "")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        # Without Python's advice on how to allow longer numbers.
        fault = str(error).partition("; use sys.")[0]
        raise InvalidRequest(f"the body is not valid JSON: {fault}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body must be an object", param="body")
    return value


def _served(
    fields: Mapping[str, Any], kind: type[Body], ignored: list[str] | None
) -> dict[str, Any]:
    """The fields of a request of this kind. Raises Unsupported or InvalidRequest naming the first
    that is not served and asks for something."""
    served = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name in kind.__struct_fields__:
            served[name] = value
        elif not _asks_for_nothing(name, value, fields, kind):
            if name in UNSERVED or name in kind.unserved:
                hint = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
                raise Unsupported(f"{name} is not supported yet{hint}", param=name)
            if (home := _home(name, kind)) and (
                ignored is None or not _is_default(value, name, home)
            ):
                message = f"{name} is a field of {home.endpoint}, not of {kind.endpoint}"
                raise InvalidRequest(message, param=name)
            if ignored is None and name in HINTS:
                raise Unsupported(f"{name} has no effect here", param=name)
            if ignored is None:
                raise InvalidRequest(f"unknown field: {name}", param=name)
            ignored.append(name)
        elif ignored is not None and name in HARMLESS:
            ignored.append(name)
    return served


def _asks_for_nothing(
    name: str, value: object, fields: Mapping[str, Any], kind: type[Body]
) -> bool:
    if name in HARMLESS or (name == "best_of" and value == fields.get("n")):
        return True  # the best n of n are all of them
    if name == "add_special_tokens":
        return value is (kind is CompletionRequest)  # a template writes its own
    neutral = UNSERVED.get(name, HINTS.get(name))
    if name in kind.unserved:
        neutral = kind.neutral
    return neutral is not None and is_neutral(value, neutral)


def _home(name: str, kind: type[Body]) -> type[GenerateRequest] | None:
    """The endpoint whose field it is, where `kind` generates without it."""
    if not kind.endpoint or name in ANYWHERE:
        return None
    return next((home for home in REQUESTS.values() if name in home.__struct_fields__), None)


def _is_default(value: object, name: str, kind: type[Body]) -> bool:
    (field,) = [field for field in msgspec.structs.fields(kind) if field.name == name]
    return value in ("", [], {}) or is_neutral(value, (field.default,))


def _named(error: InvalidRequest, fields: Mapping[str, Any]) -> InvalidRequest:
    """The error under the name and code that clients expect."""
    param, value = error.param or "", error.message.partition(" value ")[2]
    if param.startswith("tool_choice") and not fields.get("tools"):
        return InvalidRequest("tool_choice needs tools", param="tool_choice")
    if value and (param.endswith(".type") or value == "'function'"):  # the older form of a tool
        return Unsupported(f"{param} {value} is not supported", param=param)
    if value and (choices := _CHOICES.get(param.rpartition(".")[2])):
        listed = ", ".join(choices)
        return InvalidRequest(f"{param} must be one of {listed}, got {value}", param=param)
    if error.message.startswith(f"{param} must be null"):
        return Unsupported(f"{param} is not supported", param=param)
    return error


def _holds_ids(value: object) -> bool:
    return _are_ids(value) or (isinstance(value, list) and not set(map(type, value)) <= _JSON)


def _are_ids(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | list) and len(value) > 0


def _stand_in(value: object) -> object:
    """A short value of the same type, for the checks."""
    if _are_ids(value):
        return [0]
    assert isinstance(value, list)
    return [[0] if _are_ids(item) else item for item in value]


class _Shape:
    """Where a type holds objects whose fields are known."""

    def __init__(self, kind: inspect.Type) -> None:
        options = list(_options(kind))
        self._structs = [
            (struct, {field.encode_name: _Shape(field.type) for field in struct.fields})
            for struct in options
            if isinstance(struct, inspect.StructType)
        ]
        lists = [option for option in options if isinstance(option, inspect.ListType)]
        items = _Shape(lists[0].item_type) if lists else None
        self._items = items if items and items.holds_objects else None

    @property
    def holds_objects(self) -> bool:
        return bool(self._structs) or self._items is not None

    def cleaned(self, value: Any, path: str, ignored: list[str] | None) -> Any:
        """`value` without the fields of known objects that ask for nothing or are unknown. Raises
        Unsupported naming the first of those that must not be left out."""
        if isinstance(value, list) and self._items is not None:
            items = self._items
            return [items.cleaned(item, f"{path}[{i}]", ignored) for i, item in enumerate(value)]
        if isinstance(value, dict):
            for struct, shapes in self._structs:
                if struct.tag is None or value.get(str(struct.tag_field)) == struct.tag:
                    return dict(_cleaned_fields(value, struct, shapes, path, ignored))
        return value


def _options(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _options(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for option in kind.types:
            yield from _options(option)
    else:
        yield kind


def _cleaned_fields(
    value: Mapping[str, Any],
    struct: inspect.StructType,
    shapes: Mapping[str, _Shape],
    path: str,
    ignored: list[str] | None,
) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if item is None:
            continue
        place = f"{path}.{name}" if path else name
        if name in shapes:
            yield name, shapes[name].cleaned(item, place, ignored)
        elif name == struct.tag_field:
            yield name, item
        elif issubclass(struct.cls, Body) and not is_neutral(item, struct.cls.neutral):
            if ignored is None or name in struct.cls.unserved:
                raise Unsupported(f"{place} is not supported", param=place)
            ignored.append(place)
        elif ignored is not None and not issubclass(struct.cls, Body):
            ignored.append(place)


def _check_unicode(value: Any, path: str) -> None:
    """Raise InvalidRequest naming a text with a lone surrogate: it has no UTF-8 form."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            param = re.sub(r"\[\d+\]$", "", path) or "body"  # of a field's name
            raise InvalidRequest(
                f"{param} is not valid Unicode: {error.reason}", param=param
            ) from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_unicode(name, path)
            _check_unicode(item, f"{path}.{name}".removeprefix("."))
    elif isinstance(value, list) and not _HOLD_TEXT.isdisjoint(map(type, value)):
        for i, item in enumerate(value):
            _check_unicode(item, f"{path}[{i}]")
