"""Reads a ClusterConfig from a YAML file, then `BATON_*` variables, then `--set FIELD=VALUE`.

The three fill one tree, from which the sections are built strictly: they are dataclasses, and this
module walks them, so that every error names a field's full path and the nearest valid name. msgspec
converts and bounds the values. Text is accepted for any type, since variables and `--set` carry
nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Union

import msgspec
import yaml

from cluster.config.schema import DERIVED, UNRESOLVED, ClusterConfig
from protocol.errors import BatonError, InvalidRequest

#: Variables named BATON_* that are not fields of the configuration.
RESERVED = frozenset(
    {
        "BATON_API_KEY",
        "BATON_CONFIG",
        "BATON_HOME",
        "BATON_LOG_LEVEL",
        "BATON_NATIVE_KERNELS",
        "BATON_TLS_CA",
        "BATON_TLS_CERT",
        "BATON_TLS_KEY",
    }
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)", re.IGNORECASE)
_POWER = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
#: As in YAML: 16_384.
_SEPARATOR = re.compile(r"(?<=\d)_(?=\d)")
_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false"}
_MIN_LIKENESS = 0.65
#: The configurations of the clone or of the installed package.
_SHIPPED = Path(__file__).parents[2] / "deploy" / "configs"
#: Fields that name files of routers, which run in another directory: paths become absolute.
_FILE_NAMES = ("_file", ".chat_template")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration, and warnings to show the user."""

    config: ClusterConfig
    warnings: tuple[str, ...] = ()


def load_config(
    path: str | Path, *, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> Loaded:
    """The configuration in `path`, or the shipped one of this name, with its overrides. Raises
    InvalidRequest naming the field."""
    tree, environ = _read(find_config(path)), environ or {}
    fields = {env_name(field): field for field in leaf_paths()}
    for name in environ.keys() & fields.keys():
        _assign(tree, fields[name], environ[name])
    for override in overrides:
        field, equals, text = override.partition("=")
        if not equals or not field.strip():
            raise InvalidRequest(f"--set {override!r}: expected FIELD=VALUE", param="--set")
        _assign(tree, field.strip(), text.strip())
    unknown = {name for name in environ if name.startswith("BATON_")} - fields.keys() - RESERVED
    return Loaded(
        config=_section(ClusterConfig, tree, ""),
        warnings=tuple(_unknown_variable(name, fields) for name in sorted(unknown)),
    )


def find_config(name: str | Path) -> Path:
    """The configuration of this name that Baton ships, unless there is such a file."""
    path = Path(name)
    shipped = _SHIPPED / f"{path}.yaml"
    named = not path.exists() and path.parent == Path() and shipped.exists()
    return shipped if named else path


def env_name(path: str) -> str:
    """The environment variable of a field: `model.dtype` -> `BATON_MODEL_DTYPE`."""
    return "BATON_" + path.replace(".", "_").upper()


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        shipped = ", ".join(sorted(file.stem for file in _SHIPPED.glob("*.yaml")))
        message = f"no configuration file {path}; Baton ships {shipped}"
        raise InvalidRequest(message, param=str(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", param=str(path)) from error
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        raise InvalidRequest(f"{path} must hold sections of fields", param=str(path))
    return tree


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _value in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _unknown_variable(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {match[0]}?)" if match else ""
    return f"environment variable {name} is not a setting of Baton: ignored{hint}"


def _assign(tree: dict[str, Any], path: str, text: str) -> None:
    """Set a dotted path in the tree; `_section` converts the text to the field's type."""
    *sections, last = path.split(".")
    node = tree
    for i, name in enumerate(sections):
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            above = ".".join(sections[: i + 1])
            raise InvalidRequest(f"{path}: {above} is a value, not a section", param=path)
    # Lists and maps are YAML; anything else stays text.
    node[last] = _parse(text, path) if text.startswith(("[", "{")) else text


def _parse(text: str, where: str) -> object:
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InvalidRequest(f"{where} is not valid YAML: {reason}", param=where) from error
    except RecursionError as error:
        raise InvalidRequest(f"{where} is nested too deeply", param=where) from error


# --- building the sections --------------------------------------------------------------------


def leaf_paths(cls: Any = ClusterConfig, prefix: str = "") -> Iterator[str]:
    """Every settable dotted path."""
    for name, kind in _fields(cls).items():
        if (cls, name) in DERIVED:
            continue
        if dataclasses.is_dataclass(kind):
            yield from leaf_paths(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _fields(cls: type) -> dict[str, Any]:
    """The fields of a section with their types, bounds included."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _section(cls: Any, tree: object, path: str) -> Any:
    """A dataclass from a map of its fields; None stands for an empty map."""
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise _refuse(path, f"expected a section of fields, got {_shown(tree)}")
    fields = _fields(cls)
    for name in tree:
        _check_name(cls, str(name), path)
    given = {n: _value(fields[n], v, _join(path, n)) for n, v in tree.items()}
    for field in dataclasses.fields(cls):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            given[field.name] = _missing(cls, field.name, path)
    try:
        return cls(**given)
    except (BatonError, ValueError) as error:  # its message may begin with a field's name
        name, _, rest = str(error).partition(" ")
        where, message = (_join(path, name), rest) if name in fields else (path, str(error))
        raise _refuse(where, message) from error


def _value(kind: Any, value: object, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _section(kind, value, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            return None
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return _value(inner, value, path)
    if origin is tuple:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, (list, tuple)):
            raise _refuse(path, f"expected a list, got {_shown(value)}")
        return tuple(_value(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _refuse(path, f"expected a map, got {_shown(value)}")
        return {
            str(key): _value(arguments[1], item, _join(path, str(key)))
            for key, item in value.items()
        }
    return _scalar(kind, value, path)


def _missing(cls: type, name: str, path: str) -> Any:
    if (cls, name) in DERIVED:
        return UNRESOLVED
    kind, field = _fields(cls)[name], _join(path, name)
    if dataclasses.is_dataclass(kind):
        return _section(kind, {}, field)  # names the first required field in it
    raise _refuse(field, "is required")


def _check_name(cls: type, name: str, path: str) -> None:
    field = _join(path, name)
    if (cls, name) in DERIVED:
        source = DERIVED[cls, name]
        if source.startswith("."):
            source = path.rpartition(".")[0] + source
        raise _refuse(field, f"is set by {source}: set that instead")
    if name not in _fields(cls):
        raise _refuse(field, f"no such field{_suggest(field)}")


def _suggest(path: str) -> str:
    leaves = list(leaf_paths())
    sections = {leaf.rpartition(".")[0] for leaf in leaves} - {""}
    best = max(sorted({*leaves, *sections}), key=lambda known: _likeness(path, known))
    return f"; did you mean {best}?" if _likeness(path, best) >= _MIN_LIKENESS else ""


def _likeness(path: str, known: str) -> float:
    """How similar the paths are: mostly in their last part, then in their sections."""
    *sections, name = path.split(".")
    *known_sections, known_name = known.split(".")
    likeness = difflib.SequenceMatcher(None, name, known_name).ratio()
    if name in known_name.split("_") or known_name.startswith(name) or known_name.endswith(name):
        likeness = max(likeness, 0.9)
    above = difflib.SequenceMatcher(None, ".".join(sections), ".".join(known_sections)).ratio()
    return likeness + 0.3 * above


def _scalar(kind: Any, value: object, path: str) -> Any:
    """`value` converted to a number, text, truth value or enum within the bounds of `kind`."""
    bare = bare_type(kind)
    if bare is str and type(value) in (int, float):
        value = str(value)
    if bare is str and path.endswith(_FILE_NAMES) and isinstance(value, str) and value:
        return str(Path(value).expanduser().absolute())
    if bare is int and isinstance(value, str) and path.endswith("_bytes"):
        value = _num_bytes(value)
    plain = value
    if bare in _WORDS and isinstance(value, str):
        plain = _SEPARATOR.sub("", value.strip())
    with contextlib.suppress(msgspec.ValidationError):
        converted = msgspec.convert(plain, kind, strict=not isinstance(plain, str))
        if not isinstance(converted, float) or math.isfinite(converted):
            return converted
    expected = _WORDS.get(bare, bare.__name__)
    if issubclass(bare, StrEnum):
        expected = "one of " + ", ".join(bare)
    raise _refuse(path, f"expected {expected}{bounds(kind)}, got {_shown(value)}")


def bare_type(kind: Any) -> type:
    """The type without its bounds."""
    bare: type = kind.__origin__ if typing.get_origin(kind) is Annotated else kind
    return bare


def bounds(kind: Any) -> str:
    """The bounds of a number's type, in words."""
    if typing.get_origin(kind) is not Annotated:
        return ""
    (meta,) = kind.__metadata__
    if meta.gt is not None:
        return f" above {meta.gt}"
    return f" from {meta.ge} to {meta.le}" if meta.le is not None else f", at least {meta.ge}"


def _num_bytes(text: str) -> int | str:
    """The number of bytes that `text` gives with a unit; otherwise `text`."""
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        return text
    base = 1024 if "i" in size[2].lower() else 1000
    return int(float(size[1]) * base ** _POWER[size[2][0].lower()])


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {message}" if path else message, param=path or None)


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
