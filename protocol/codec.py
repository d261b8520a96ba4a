"""Messages as bytes: msgpack (https://msgpack.org), written and read by msgspec.

Decoding is strict: a wrong type, an unknown enum value, an array too short or too long is an
InvalidRequest that names the field. Nothing is ever unpickled.
"""

from __future__ import annotations

import re
import threading
import types
import typing
from functools import cache
from typing import Any, TypeVar

import msgspec

from protocol.errors import InvalidRequest
from protocol.message import Message

M = TypeVar("M", bound=Message)
_PLACE = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_INDEX = re.compile(r"\[([^]]+)\]")
_encoder = msgspec.msgpack.Encoder()
#: msgspec 0.22 crashes where a thread meets a type of which another has read only some fields.
building = threading.Lock()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(cls: type[M], data: bytes) -> M:
    """The message of class `cls` in `data`. Raises InvalidRequest naming the wrong field."""
    try:
        return typing.cast(M, _decoder(cls).decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        place = _PLACE.search(str(error))
        reason = str(error)[: place.start()] if place else str(error)
        path = _field_path(cls, _INDEX.findall(place[1]) if place else [])
        raise InvalidRequest(f"{path}: {reason}", param=path) from None


@cache
def _decoder(cls: type[Message]) -> msgspec.msgpack.Decoder[Any]:
    with building:
        return msgspec.msgpack.Decoder(cls)


def _field_path(cls: type[Message], indices: list[str]) -> str:
    """`Cancel.keys[0].attempt` for the indices 0, 0, 1: msgspec numbers fields as well as items."""
    path, kind = cls.__name__, cls
    for index in indices:
        name, kind = _item(kind, index)
        path += name
    return path


def _item(kind: Any, index: str) -> tuple[str, Any]:
    """Name and type of one item of a value of type `kind`."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind,) = (arg for arg in typing.get_args(kind) if arg is not types.NoneType)
    if isinstance(kind, type):
        name = (*getattr(kind, "__struct_fields__", getattr(kind, "_fields", ())),)[int(index)]
        return f".{name}", typing.get_type_hints(kind)[name]
    args = typing.get_args(kind)
    if typing.get_origin(kind) is dict:
        return f"[{index}]", args[1]
    return f"[{index}]", args[0] if args[-1] is Ellipsis else args[int(index)]
