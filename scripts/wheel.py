"""The build hook of the wheel: everything goes below one package, `baton_llm`.

In the repository the packages are at the top level, with names that other distributions use too
(`cluster`, `router`, ...). After the usual build, the archive is written anew: packages become
subpackages of `baton_llm`, their imports of each other follow, and `deploy/` goes along. Editable
installations keep the names of the repository. A file that could not be moved so fails the build.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import re
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT_PACKAGE = "baton_llm"
_INIT = '"""Baton, as installed: https://pypi.org/project/baton-llm/. Import its subpackages."""\n'
_DATE = (1980, 1, 1, 0, 0, 0)


class NestedWheel(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling."""

    PLUGIN_NAME = "custom"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Write a standard wheel anew."""
        if self.target_name == "wheel" and version == "standard":
            packages = self.build_config.target_config["packages"]
            nest(Path(artifact_path), packages, Path(self.root) / "deploy")


def nest(wheel: Path, packages: Collection[str], data: Path) -> None:
    """Move the packages of a wheel below ROOT_PACKAGE, and add the files of `data`."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    moved = {f"{ROOT_PACKAGE}/__init__.py": _INIT.encode(), f"{ROOT_PACKAGE}/py.typed": b""}
    record = ""
    for name, content in files.items():
        if name.partition("/")[0] in packages:
            if name.endswith((".py", ".pyi")):
                content = nested_imports(content.decode(), packages, name).encode()
            name = f"{ROOT_PACKAGE}/{name}"
        elif name.endswith("entry_points.txt"):
            content = content.replace(b" = ", f" = {ROOT_PACKAGE}.".encode())
        elif name.endswith("/RECORD"):
            record = name
            continue
        moved[name] = content
    for path in sorted(path for path in data.rglob("*") if path.is_file()):
        moved[f"{ROOT_PACKAGE}/{data.name}/{path.relative_to(data)}"] = path.read_bytes()
    moved[record] = _record(moved, record).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in moved.items():
            info = zipfile.ZipInfo(name, _DATE)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(info, content)


def nested_imports(source: str, packages: Collection[str], name: str) -> str:
    """`source` with the imports of `packages` changed to their places below ROOT_PACKAGE. Raises
    ValueError for an import that would bind another name then, and for a module's name in a text
    that a program would look for."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            root = (node.module or "").partition(".")[0]
            keyword = "from"
        elif isinstance(node, ast.Import):
            root = next((n for alias in node.names if (n := _root(alias)) in packages), "")
            keyword = "import"
            bound = any(isinstance(n, ast.Name) and n.id == root for n in ast.walk(tree))
            if root and (bound or len(node.names) > 1):
                raise ValueError(f"{name}:{node.lineno}: write `from ... import` for {root}")
        else:
            continue
        if root in packages:
            at = node.lineno - 1
            begin, rest = lines[at][: node.col_offset], lines[at][node.col_offset :]
            lines[at] = begin + rest.replace(
                f"{keyword} {root}", f"{keyword} {ROOT_PACKAGE}.{root}", 1
            )
    for text in _texts(tree):
        if re.fullmatch(rf"({'|'.join(packages)})(\.\w+)+", text) and not name.endswith("_pb2.py"):
            module = Path(*text.split("."))
            if module.with_suffix(".py").is_file() or module.is_dir():
                raise ValueError(f"{name}: {text!r} is a module's name: use __name__, __package__")
    return "".join(lines)


def _root(alias: ast.alias) -> str:
    return alias.name.partition(".")[0]


def _texts(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _record(files: dict[str, bytes], record: str) -> str:
    rows = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
        rows.append(f"{name},sha256={digest.decode()},{len(content)}\n")
    return "".join([*rows, f"{record},,\n"])
