"""Build nested dataclasses from plain trees, strictly: unknown names, wrong types and values out of
range are refused with the full dotted path, and the nearest valid name is suggested."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar, Union

from protocol.errors import BatonError, InvalidRequest

T = TypeVar("T")
Derived = Mapping[tuple[type, str], str]
#: Stands for a required field that is filled in from elsewhere.
UNRESOLVED = "unresolved"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)", re.IGNORECASE)
_LIKE_ENOUGH = 0.65
_POWER = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def build(cls: type[T], tree: object, *, derived: Derived) -> T:
    """The dataclass `cls` from a tree of dicts, lists and scalars. Raises InvalidRequest whose
    `param` is the dotted path at fault."""
    return typing.cast(T, _build(cls, tree, "", _Context(cls, derived)))


def leaf_paths(cls: type, derived: Derived) -> dict[str, Any]:
    """Every settable dotted path below `cls`, with its type."""
    return dict(_leaves(cls, "", derived))


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
    root: type
    derived: Derived

    def suggest(self, path: str) -> str:
        known = leaf_paths(self.root, self.derived)
        sections = {leaf.rpartition(".")[0] for leaf in known} - {""}
        best = max(sorted({*known, *sections}), key=lambda name: _likeness(path, name))
        return f"; did you mean {best}?" if _likeness(path, best) >= _LIKE_ENOUGH else ""


def _likeness(path: str, name: str) -> float:
    """How well `name` fits what was written: by its last part, then by where it stands."""
    *above, last = path.split(".")
    *over, end = name.split(".")
    like = difflib.SequenceMatcher(None, last, end).ratio()
    if last in end.split("_") or end.startswith(last) or end.endswith(last):
        like = max(like, 0.9)
    place = difflib.SequenceMatcher(None, ".".join(above), ".".join(over)).ratio()
    return like + 0.3 * place


def _leaves(cls: type, prefix: str, derived: Derived) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    for name in (f.name for f in dataclasses.fields(cls)):
        if (cls, name) in derived:
            continue
        path, kind = f"{prefix}{name}", hints[name]
        if dataclasses.is_dataclass(kind):
            yield from _leaves(typing.cast(type, kind), f"{path}.", derived)
        else:
            yield path, kind


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {message}" if path else message, param=path or None)


def _build(kind: Any, value: object, path: str, context: _Context) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build_section(typing.cast(type, kind), value, path, context)
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            return None
        inner = next(arg for arg in typing.get_args(kind) if arg is not type(None))
        return _build(inner, value, path, context)
    if origin is tuple:
        return _build_tuple(typing.get_args(kind)[0], value, path, context)
    if origin is dict:
        return _build_dict(typing.get_args(kind)[1], value, path, context)
    return _scalar(kind, value, path)


def _build_section(cls: type, value: object, path: str, context: _Context) -> Any:
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise _refuse(path, f"expected a section of fields, got {_shown(value)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in value:
        _check_name(cls, str(name), path, context)
    given = {n: _build(hints[n], v, _join(path, n), context) for n, v in value.items()}
    for name in _missing(cls, given):
        if (cls, name) in context.derived:
            given[name] = UNRESOLVED
        elif dataclasses.is_dataclass(hints[name]):
            given[name] = _build(hints[name], {}, _join(path, name), context)
        else:
            raise _refuse(_join(path, name), "is required")
    try:
        return cls(**given)
    except BatonError as error:
        raise _complaint(path, fields, error.message) from error
    except ValueError as error:
        raise _complaint(path, fields, str(error)) from error


def _check_name(cls: type, name: str, path: str, context: _Context) -> None:
    where = _join(path, name)
    if (cls, name) in context.derived:
        source = context.derived[cls, name]
        if source.startswith("."):
            section = path.rpartition(".")[0]
            source = f"{section}{source}"
        raise _refuse(where, f"is set by {source}: set that instead")
    if name not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        raise _refuse(where, f"no such field{context.suggest(where)}")


def _missing(cls: type, given: Mapping[str, object]) -> list[str]:
    """The fields without a default that were not given."""
    nothing = dataclasses.MISSING
    return [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is nothing and f.default_factory is nothing and f.name not in given
    ]


def _complaint(path: str, fields: Mapping[str, object], message: str) -> InvalidRequest:
    """A section's own check as an error of the field that its message begins with."""
    name, _, rest = message.partition(" ")
    return _refuse(_join(path, name), rest) if name in fields else _refuse(path, message)


def _build_tuple(kind: Any, value: object, path: str, context: _Context) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise _refuse(path, f"expected a list, got {_shown(value)}")
    return tuple(_build(kind, item, f"{path}[{i}]", context) for i, item in enumerate(value))


def _build_dict(kind: Any, value: object, path: str, context: _Context) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(path, f"expected a map, got {_shown(value)}")
    return {str(k): _build(kind, v, _join(path, str(k)), context) for k, v in value.items()}


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def _scalar(kind: Any, value: object, path: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind, value, path)
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if kind is bool:
        return _bool(value, path)
    if kind is int:
        return _int(value, path)
    if kind is float:
        return _float(value, path)
    raise _refuse(path, f"expected {getattr(kind, '__name__', kind)}, got {_shown(value)}")


def _enum(kind: type[Enum], value: object, path: str) -> Enum:
    for member in kind:
        if value == member.value:
            return member
    allowed = ", ".join(str(member.value) for member in kind)
    raise _refuse(path, f"{value!r} is not one of {allowed}")


def _bool(value: object, path: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _refuse(path, f"expected true or false, got {_shown(value)}")


def _int(value: object, path: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        if path.endswith("_bytes") and (size := _SIZE.fullmatch(value.strip())):
            base = 1024 if "i" in size[2].lower() else 1000
            return int(float(size[1]) * base ** _POWER[size[2][0].lower()])
        with contextlib.suppress(ValueError):
            return int(value)
    raise _refuse(path, f"expected a whole number, got {_shown(value)}")


def _float(value: object, path: str) -> float:
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = float(value)
    if not math.isfinite(number):
        raise _refuse(path, f"expected a finite number, got {_shown(value)}")
    return number
