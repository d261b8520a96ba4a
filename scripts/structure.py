"""Measure how the product is built: `python scripts/structure.py` (`make structure`).

The product is the packages of the wheel (pyproject.toml) without generated code; tests, benchmarks
and scripts do not count. Measured are

- lines, files and functions;
- import cycles: sets of files that import each other, imports inside functions and under
  TYPE_CHECKING included;
- modules with one importer: imported by exactly one other product module, so that they may be a
  part of it (packages' `__init__` files aside);
- ambiguous classes: class names defined in more than one module;
- full folders: with more modules than MAX_MODULES;
- path files: files that one streamed completion enters (`scripts/request_path.py` says how).

`--check` compares with the limits in the table of docs/architecture.md and fails on growth;
`--lists` prints what was counted; `--no-path` leaves out the part that runs a request.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "architecture.md"
MAX_MODULES = 16

Graph = dict[str, set[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of the product."""

    name: str  # router.request.parse; a package's own name for its __init__
    path: str  # below the root
    lines: int
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether this is an `__init__` file."""
        return self.path.endswith("/__init__.py")


def product_packages() -> list[str]:
    """The top-level packages of the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def read_modules(packages: Iterable[str], root: Path = ROOT) -> dict[str, Module]:
    """Every module by name."""
    paths = (path for package in packages for path in sorted((root / package).rglob("*.py")))
    modules = (_read(path, root) for path in paths if "_pb2" not in path.stem)
    return {module.name: module for module in modules}


def _read(path: Path, root: Path) -> Module:
    text = path.read_text()
    below = path.relative_to(root)
    parts = below.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name=name, path=str(below), lines=len(text.splitlines()), tree=ast.parse(text))


class Structure:
    """What the product's modules are made of and how they import each other."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules

    @cached_property
    def imports(self) -> Graph:
        """The product modules that each module imports, wherever in it."""
        return {name: set(self._imported(module)) for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterator[str]:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in self.modules else node.module for name in inner]
            else:
                continue
            yield from (name for name in names if name in self.modules and name != module.name)

    @cached_property
    def cycles(self) -> list[list[str]]:
        """Sets of modules that reach each other, each sorted."""
        reached = {name: _reachable(self.imports, name) for name in self.modules}
        knots = {
            frozenset(other for other in reached[name] if name in reached[other])
            for name in self.modules
            if name in reached[name]
        }
        return sorted(sorted(knot) for knot in knots)

    @cached_property
    def single_importer(self) -> dict[str, str]:
        """Modules with exactly one importer, and that one."""
        importers: Graph = defaultdict(set)
        for name, imported in self.imports.items():
            for other in imported:
                importers[other].add(name)
        return {
            name: next(iter(importers[name]))
            for name, module in sorted(self.modules.items())
            if len(importers[name]) == 1 and not module.is_package
        }

    @cached_property
    def ambiguous_classes(self) -> dict[str, list[str]]:
        """Class names (`_Name` is `Name`) that several modules define, and these."""
        owners: dict[str, list[str]] = defaultdict(list)
        for name, module in self.modules.items():
            classes = (n for n in ast.walk(module.tree) if isinstance(n, ast.ClassDef))
            for cls in {node.name.lstrip("_") for node in classes}:
                owners[cls].append(name)
        return {cls: names for cls, names in sorted(owners.items()) if len(names) > 1}

    @cached_property
    def full_folders(self) -> dict[str, int]:
        """Folders with too many modules (`__init__` aside), and how many they have."""
        counts = Counter(
            module.path.rpartition("/")[0]
            for module in self.modules.values()
            if not module.is_package
        )
        return {folder: count for folder, count in counts.items() if count > MAX_MODULES}

    @property
    def lines(self) -> int:
        return sum(module.lines for module in self.modules.values())

    @property
    def functions(self) -> int:
        """Functions and methods, nested ones included."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        return sum(
            isinstance(node, kinds)
            for module in self.modules.values()
            for node in ast.walk(module.tree)
        )


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def path_files(structure: Structure) -> dict[str, int]:
    """Files that a streamed completion enters, and the lines of each."""
    sys.path.insert(0, str(ROOT))
    from scripts.request_path import functions_on_path

    lines = {module.path: module.lines for module in structure.modules.values()}
    entered = {path for path, _ in functions_on_path(lambda path: path in lines)}
    return {path: lines[path] for path in sorted(entered)}


def figures(structure: Structure, path: dict[str, int] | None) -> dict[str, int]:
    """Every figure under the name that it has in the table."""
    found = {
        "lines": structure.lines,
        "files": len(structure.modules),
        "functions": structure.functions,
        "import cycles": len(structure.cycles),
        "modules with one importer": len(structure.single_importer),
        "ambiguous classes": len(structure.ambiguous_classes),
        "full folders": len(structure.full_folders),
    }
    return found if path is None else found | {"path files": len(path)}


def limits(page: str) -> dict[str, int]:
    """The limits in the page's table, rows `| name | limit | ... |`."""
    rows = re.findall(r"^\| ([a-z ]+) \| ([\d,]+) \|", page, re.MULTILINE)
    return {name: int(limit.replace(",", "")) for name, limit in rows}


def lists(structure: Structure, path: dict[str, int] | None) -> Iterator[str]:
    """What was counted, a line each under headings."""
    yield "import cycles"
    yield from (f"  {' '.join(cycle)}" for cycle in structure.cycles)
    yield "modules with one importer"
    for name, importer in structure.single_importer.items():
        yield f"  {structure.modules[name].lines:4} {name} <- {importer}"
    yield "ambiguous classes"
    for cls, owners in structure.ambiguous_classes.items():
        yield f"  {cls}: {' '.join(owners)}"
    yield "full folders"
    yield from (f"  {folder}: {count}" for folder, count in structure.full_folders.items())
    if path is not None:
        yield f"path files, {sum(path.values()):,} lines together"
        yield from (f"  {lines:4} {name}" for name, lines in path.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 when one of them exceeds its limit."""
    parser = argparse.ArgumentParser(prog="scripts/structure.py")
    parser.add_argument("--check", action="store_true", help="fail on a figure above its limit")
    parser.add_argument("--lists", action="store_true", help="print what was counted")
    parser.add_argument("--no-path", action="store_true", help="do not run a request")
    options = parser.parse_args(arguments)
    structure = Structure(read_modules(product_packages()))
    path = None if options.no_path else path_files(structure)
    found, allowed = figures(structure, path), limits(TABLE.read_text())
    if options.lists:
        sys.stdout.write("\n".join(lists(structure, path)) + "\n")
    for name, value in found.items():
        sys.stdout.write(f"{name:26} {value:6,}  (limit {allowed[name]:,})\n")
    above = [name for name, value in found.items() if value > allowed[name]]
    if options.check and above:
        sys.stderr.write(f"above the limit in {TABLE.relative_to(ROOT)}: {', '.join(above)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
