"""Reads a ClusterConfig from a YAML file, then `BATON_*` variables, then `--set FIELD=VALUE`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.config.schema import ClusterConfig
from cluster.config.tree import build, leaf_paths
from protocol.errors import InvalidRequest

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration, and warnings to show the user."""

    config: ClusterConfig
    warnings: tuple[str, ...] = ()


def load_config(
    path: str | Path, *, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> Loaded:
    """The configuration in `path` with its overrides. Raises InvalidRequest naming the field."""
    tree, environ = _read(Path(path)), environ or {}
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
        config=build(tree),
        warnings=tuple(_unknown_variable(name, fields) for name in sorted(unknown)),
    )


def env_name(path: str) -> str:
    """The environment variable of a field: `model.dtype` -> `BATON_MODEL_DTYPE`."""
    return "BATON_" + path.replace(".", "_").upper()


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InvalidRequest(f"no configuration file {path}", param=str(path)) from error
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
    """Set a dotted path in the tree; `build` converts the text to the field's type."""
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
