"""Messages as msgpack (https://msgpack.org): a dataclass is the array of its fields, in order.

Decoding is driven by the declared types and is strict: a wrong type, a missing or an extra field is
an InvalidRequest naming the path. Nothing is ever unpickled. Encoders and decoders are built once
per class; every token of every stream passes both, so a path is put together only for an error.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, Union

import msgpack

from protocol.errors import InvalidRequest

T = TypeVar("T")
_Decoder = Callable[[Any], Any]
_SCALARS: frozenset[Any] = frozenset({int, str, bytes, bool})


class _Wrong(Exception):
    """A value of the wrong type; whoever decodes what holds it adds its name in front."""

    def __init__(self, expected: str, value: object) -> None:
        super().__init__(f"expected {expected}, got {type(value).__name__}")
        self.names: list[str] = []


def encode(message: object) -> bytes:
    """The bytes of one dataclass message."""
    return typing.cast(bytes, msgpack.packb(message, use_bin_type=True, default=_plain))


def decode(cls: type[T], data: bytes) -> T:
    """The message of class `cls` in `data`. Raises InvalidRequest naming the wrong field."""
    kind: Any = cls
    decoder = _decoder(kind)
    try:
        raw = msgpack.unpackb(
            data, raw=False, use_list=False, strict_map_key=False, ext_hook=_no_extension
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise InvalidRequest(f"{cls.__name__}: not msgpack: {error}", param=cls.__name__) from error
    try:
        return typing.cast(T, decoder(raw))
    except _Wrong as wrong:
        path = ".".join([cls.__name__, *reversed(wrong.names)])
        raise InvalidRequest(f"{path}: {wrong}", param=path) from None


def _no_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _plain(value: Any) -> Any:
    """What msgpack asks about: anything but numbers, strings (string enums too) and containers."""
    cls: Any = type(value)
    return _plain_of(cls)(value)


@cache
def _plain_of(cls: Any) -> Callable[[Any], Any]:
    if issubclass(cls, Enum):
        return attrgetter("value")
    if cls is int:
        raise OverflowError("integers have at most 64 bits on the wire")
    kind: Any = cls
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{cls.__name__} has no wire form")
    names = _field_names(cls)
    if len(names) > 1:
        return attrgetter(*names)  # a tuple of all of them
    return lambda value: [getattr(value, name) for name in names]


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    if _is_named_tuple(cls):
        return tuple(cls._fields)
    return tuple(f.name for f in dataclasses.fields(cls))


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@cache
def _decoder(kind: Any) -> _Decoder:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) or _is_named_tuple(kind):
        return _record_decoder(kind)
    if origin in (Union, types.UnionType):
        return _optional_decoder(kind)
    if origin is tuple:
        return _tuple_decoder(kind)
    if origin is dict:
        return _dict_decoder(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_decoder(kind)
    if kind is float:
        return _decode_float
    if kind in _SCALARS:
        return _scalar_decoder(kind)
    raise TypeError(f"{kind} has no wire form")


def _decode_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Wrong("float", value)
    return float(value)


def _scalar_decoder(kind: type) -> _Decoder:
    def scalar(value: Any) -> Any:
        if type(value) is not kind:
            raise _Wrong(kind.__name__, value)
        return value

    return scalar


def _enum_decoder(kind: type[Enum]) -> _Decoder:
    def member(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            raise _Wrong(kind.__name__, value) from None

    return member


def _record_decoder(kind: Any) -> _Decoder:
    """Written out as source, as dataclasses do with their methods: loops over fields take twice as
    long. `refuse` looks for what is wrong."""
    hints = typing.get_type_hints(kind)
    names = _field_names(kind)
    parts = [_decoder(hints[name]) for name in names]

    def refuse(value: Any) -> None:
        if type(value) is not tuple or len(value) != len(names):
            raise _Wrong(f"{kind.__name__} of {len(names)} fields", value)
        for name, part, item in zip(names, parts, value, strict=True):
            try:
                part(item)
            except _Wrong as wrong:
                wrong.names.append(name)
                raise

    fields = range(len(names))
    scalar = [hints[name] in _SCALARS for name in names]
    values = [f"v{i}" if scalar[i] else f"part{i}(v{i})" for i in fields]
    lines = [
        "def build(value):",
        f" if type(value) is not tuple or len(value) != {len(names)}: refuse(value)",
        f" [{', '.join(f'v{i}' for i in fields)}] = value",
        *(f" if type(v{i}) is not type{i}: refuse(value)" for i in fields if scalar[i]),
        " try:",
        *(f"  {line}" for line in _making(kind, names, values)),
        " except Wrong: refuse(value)",
    ]
    scope: dict[str, Any] = {"kind": kind, "refuse": refuse, "Wrong": _Wrong}
    scope |= {"new": object.__new__, "new_tuple": tuple.__new__}
    for i, name in enumerate(names):
        scope |= {f"type{i}": hints[name], f"part{i}": parts[i], f"set{i}": _setter(kind, name)}
    exec("\n".join(lines), scope)
    return typing.cast(_Decoder, scope["build"])


def _making(kind: Any, names: tuple[str, ...], values: list[str]) -> list[str]:
    """From the values of all fields to an instance. The slots are filled directly, which is half
    the time of a frozen dataclass's own constructor, unless there is one that checks them."""
    if _is_named_tuple(kind):
        return [f"return new_tuple(kind, [{', '.join(values)}])"]
    if "__slots__" not in vars(kind) or hasattr(kind, "__post_init__"):
        return [f"return kind({', '.join(map('='.join, zip(names, values, strict=True)))})"]
    fill = [f"set{i}(message, {value})" for i, value in enumerate(values)]
    return ["message = new(kind)", *fill, "return message"]


def _setter(kind: Any, name: str) -> Any:
    return getattr(vars(kind).get(name), "__set__", None)


def _optional_decoder(kind: Any) -> _Decoder:
    inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    if len(inner) != 1 or len(typing.get_args(kind)) != 2:
        raise TypeError(f"{kind}: only `X | None` has a wire form")
    part = _decoder(inner[0])
    return lambda value: None if value is None else part(value)


def _tuple_decoder(kind: Any) -> _Decoder:
    args = typing.get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return _array_decoder(args[0])
    parts = [_decoder(arg) for arg in args]

    def fixed(value: Any) -> Any:
        if type(value) is not tuple or len(value) != len(parts):
            raise _Wrong(f"array of {len(parts)}", value)
        return tuple(part(item) for part, item in zip(parts, value, strict=True))

    return fixed


def _array_decoder(kind: Any) -> _Decoder:
    part = _decoder(kind)

    def many(value: Any) -> Any:
        if type(value) is not tuple:
            raise _Wrong("array", value)
        # A prompt can have 100,000 ids, and this runs on an event loop.
        if not value or (kind is int and set(map(type, value)) == {int}):
            return value
        return tuple([part(item) for item in value])

    return many


def _dict_decoder(kind: Any) -> _Decoder:
    key_part, value_part = (_decoder(arg) for arg in typing.get_args(kind))

    def mapping(value: Any) -> Any:
        if type(value) is not dict:
            raise _Wrong("map", value)
        found = {}
        for key, item in value.items():
            name = key_part(key)
            try:
                found[name] = value_part(item)
            except _Wrong as wrong:
                wrong.names.append(str(key))
                raise
        return found

    return mapping
