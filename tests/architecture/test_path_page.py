"""docs/path.md names files and functions that exist, and its reading list stays short."""

import ast
import re
from functools import cache

import pytest

from tests.support.sources import PACKAGES, ROOT, tree

PAGE = (ROOT / "docs" / "path.md").read_text()
HOPS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)
MAX_LINES = int(re.findall(r"fewer\s+than ([\d,]+) lines", PAGE)[0].replace(",", ""))
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def functions(path):
    """Qualified names of a file's functions and methods."""
    found = set()
    for node in tree(path).body:
        if isinstance(node, FUNCTION):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, FUNCTION)}
    return found


def test_the_tables_are_read():
    assert len(HOPS) > 30


@pytest.mark.parametrize(("file", "function"), sorted(set(HOPS)))
def test_hops_exist(file, function):
    assert function in functions(ROOT / file)


def test_files_exist():
    named = set(re.findall(r"`([\w/]+/[\w/]*(?:\.\w+)?)`", PAGE))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_methods_exist():
    """Those in the answers stand without their file."""
    every = {
        function
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for function in functions(path)
    }
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGE))
    assert sorted(named - every) == []


def test_the_reading_list_is_short():
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in {f for f, _ in HOPS})
    assert lines < MAX_LINES
