"""Files and functions are short, modules have a docstring."""

import ast
from functools import cache
from pathlib import Path

from tests.support.sources import PACKAGES, ROOT, tree

FOLDERS = (*PACKAGES, "benchmarks", "scripts")
MAX_FILE_LINES = 420
MAX_TEST_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 140  # a GPU kernel cannot be cut in two without passing every register


def python_files(*folders):
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.stem
    }


SOURCES = python_files(*FOLDERS)
TESTS = python_files("tests")


@cache
def outline(name):
    """Whether a file has a docstring, and its functions that are too long with their lengths."""
    module = tree(ROOT / name)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in ast.walk(module) if isinstance(node, kinds)]
    lengths = {f: f.end_lineno - f.lineno + 1 for f in functions}
    long = {f"{name}:{f.name}": n for f, n in lengths.items() if n > limit_of(f)}
    return bool(ast.get_docstring(module)), long


def limit_of(function):
    jitted = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return MAX_KERNEL_LINES if jitted else MAX_FUNCTION_LINES


def test_source_files_are_short():
    lengths = {name: len(text.splitlines()) for name, text in SOURCES.items()}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_test_files_are_short():
    lengths = {name: len(text.splitlines()) for name, text in TESTS.items()}
    assert {name: n for name, n in lengths.items() if n > MAX_TEST_FILE_LINES} == {}


def test_functions_are_short():
    assert [outline(name)[1] for name in SOURCES if outline(name)[1]] == []


def test_modules_say_what_they_are_for():
    assert [name for name in SOURCES if not outline(name)[0]] == []


def test_no_module_is_called_a_drawer():
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert [name for name in SOURCES if Path(name).stem in drawers] == []
