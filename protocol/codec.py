"""Messages as msgpack (https://msgpack.org): a dataclass is the array of its fields, in order.

Decoding is driven by the declared types and is strict: a wrong type, a missing or an extra field is
an InvalidRequest naming the path. Nothing is ever unpickled. Decoders are built once per class.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union

import msgpack

from protocol.errors import InvalidRequest

T = TypeVar("T")
_Decoder = Callable[[Any, str], Any]
_SCALARS: tuple[type, ...] = (int, str, bytes, bool)


def encode(message: object) -> bytes:
    """The bytes of one dataclass message."""
    return typing.cast(bytes, msgpack.packb(_plain(message), use_bin_type=True))


def decode(cls: type[T], data: bytes) -> T:
    """The message of class `cls` in `data`. Raises InvalidRequest naming the wrong field."""
    try:
        raw = msgpack.unpackb(
            data, raw=False, use_list=False, strict_map_key=False, ext_hook=_no_extension
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise InvalidRequest(f"{cls.__name__}: not msgpack: {error}", param=cls.__name__) from error
    kind: Any = cls
    return typing.cast(T, _decoder(kind)(raw, cls.__name__))


def _no_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, bytes, float)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (int, str)):
        return value
    if dataclasses.is_dataclass(value):
        cls: Any = type(value)
        return [_plain(getattr(value, name)) for name in _field_names(cls)]
    if isinstance(value, (tuple, list)):
        if _only_ints(value):  # a prompt can have 100,000 ids, and this runs on an event loop
            return value
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} has no wire form")


def _only_ints(values: Any) -> bool:
    return set(map(type, values)) == {int}


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def _wrong(path: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{path}: expected {expected}, got {type(value).__name__}", param=path)


@cache
def _decoder(kind: Any) -> _Decoder:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(typing.cast(type, kind))
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


def _decode_float(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(path, "float", value)
    return float(value)


def _scalar_decoder(kind: type) -> _Decoder:
    def scalar(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise _wrong(path, kind.__name__, value)
        return value

    return scalar


def _enum_decoder(kind: type[Enum]) -> _Decoder:
    def member(value: Any, path: str) -> Any:
        try:
            return kind(value)
        except ValueError:
            raise _wrong(path, kind.__name__, value) from None

    return member


def _dataclass_decoder(kind: type) -> _Decoder:
    hints = typing.get_type_hints(kind)
    names = _field_names(kind)
    parts = [(name, _decoder(hints[name])) for name in names]

    def build(value: Any, path: str) -> Any:
        if not isinstance(value, tuple) or len(value) != len(parts):
            raise _wrong(path, f"{kind.__name__} of {len(parts)} fields", value)
        pairs = zip(parts, value, strict=True)
        return kind(**{name: part(item, f"{path}.{name}") for (name, part), item in pairs})

    return build


def _optional_decoder(kind: Any) -> _Decoder:
    inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    if len(inner) != 1 or len(typing.get_args(kind)) != 2:
        raise TypeError(f"{kind}: only `X | None` has a wire form")
    part = _decoder(inner[0])
    return lambda value, path: None if value is None else part(value, path)


def _tuple_decoder(kind: Any) -> _Decoder:
    args = typing.get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        part = _decoder(args[0])

        def many(value: Any, path: str) -> Any:
            if not isinstance(value, tuple):
                raise _wrong(path, "array", value)
            if args[0] is int and _only_ints(value):
                return value
            return tuple(part(item, path) for item in value)

        return many
    parts = [_decoder(arg) for arg in args]

    def fixed(value: Any, path: str) -> Any:
        if not isinstance(value, tuple) or len(value) != len(parts):
            raise _wrong(path, f"array of {len(parts)}", value)
        return tuple(part(item, path) for part, item in zip(parts, value, strict=True))

    return fixed


def _dict_decoder(kind: Any) -> _Decoder:
    key_part, value_part = (_decoder(arg) for arg in typing.get_args(kind))

    def mapping(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, "map", value)
        return {key_part(k, path): value_part(v, f"{path}.{k}") for k, v in value.items()}

    return mapping
