"""The project's own Python files, parsed. Syntax trees are not kept: each run of the garbage
collector would walk through all of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The product's packages: every folder that says that it is typed.
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/py.typed"))


def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """The names of the modules that a file imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return tuple(names)
