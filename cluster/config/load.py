"""Read a ClusterConfig: the YAML file, then environment twins (`BATON_*`), then `--set a.b=c`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.config.schema import DERIVED, ClusterConfig
from cluster.config.tree import build, leaf_paths
from protocol.errors import InvalidRequest

#: Environment variables of Baton that are no configuration fields.
RESERVED = frozenset(
    {
        *("BATON_HOME", "BATON_LOG_LEVEL", "BATON_CONFIG", "BATON_API_KEY"),
        *("BATON_NATIVE_KERNELS", "BATON_TLS_CA", "BATON_TLS_CERT", "BATON_TLS_KEY"),
    }
)
#: Fields that name a file, which may be given relative to where the command runs.
FILES = tuple(
    f"router.settings.{name}"
    for name in (
        *("chat_template", "api_keys_file"),
        *("tls.cert_file", "tls.key_file", "tls.client_ca_file"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration and what the user should be told about how it was read."""

    config: ClusterConfig
    warnings: tuple[str, ...] = ()


def load_config(
    path: str | Path, *, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> Loaded:
    """The configuration in `path` with its overrides. Raises InvalidRequest naming the fault."""
    tree = _read(Path(path))
    assignments, warnings = _from_environment(environ or {})
    for where, text in assignments:
        _assign(tree, where, text)
    for override in overrides:
        where, equals, text = override.partition("=")
        if not equals or not where.strip():
            raise InvalidRequest(f"--set {override!r}: expected FIELD=VALUE", param="--set")
        _assign(tree, where.strip(), text.strip())
    config = build(ClusterConfig, _with_whole_paths(tree), derived=DERIVED)
    return Loaded(config=config, warnings=warnings)


def _with_whole_paths(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with the files of routers made absolute: routers run in another directory."""
    for where in FILES:
        *sections, name = where.split(".")
        section: Any = tree
        for key in sections:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(file := section.get(name), str) and file:
            section[name] = str(Path(file).absolute())
    return tree


def env_name(path: str) -> str:
    """The environment twin of a dotted path: `model.dtype` -> `BATON_MODEL_DTYPE`."""
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
    """A SafeLoader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _value in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _from_environment(
    environ: Mapping[str, str],
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    twins = {env_name(path): path for path in leaf_paths(ClusterConfig, DERIVED)}
    found = [(twins[name], text) for name, text in environ.items() if name in twins]
    strange = [
        name
        for name in environ
        if name.startswith("BATON_") and name not in twins and name not in RESERVED
    ]
    warnings = tuple(_unknown(name, twins) for name in sorted(strange))
    return found, warnings


def _unknown(name: str, twins: Mapping[str, str]) -> str:
    match = difflib.get_close_matches(name, twins, n=1)
    hint = f" (did you mean {match[0]}?)" if match else ""
    return f"environment variable {name} is not a setting of Baton: ignored{hint}"


def _assign(tree: dict[str, Any], path: str, text: str) -> None:
    """Set one dotted path in the tree; the value's type is settled when the dataclass is built."""
    parents, _, last = path.rpartition(".")
    node = tree
    walked: list[str] = []
    for name in filter(None, parents.split(".")):
        walked.append(name)
        child = node.setdefault(name, {})
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            raise InvalidRequest(
                f"{path}: {'.'.join(walked)} is a value, not a section", param=path
            )
        node = child
    # Lists and maps are read as YAML; everything else stays text.
    node[last] = _parse(text, path) if text.startswith(("[", "{")) else text


def _parse(text: str, where: str) -> object:
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InvalidRequest(f"{where} is not valid YAML: {reason}", param=where) from error
