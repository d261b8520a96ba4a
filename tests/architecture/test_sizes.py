"""A file or a function that has grown too long is split by noun before it is committed."""

import ast
from pathlib import Path

from tests.support.sources import ROOT, tree

FOLDERS = (
    *("protocol", "observability", "rpc", "engine", "kv_transfer", "worker_runtime"),
    *("prefill_worker", "decode_worker", "router", "cluster", "benchmarks", "examples", "scripts"),
)
MAX_FILE_LINES = 420
MAX_TEST_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 140  # a GPU kernel cannot be cut in two without passing every register


def python_files(*folders):
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    }


SOURCES = python_files(*FOLDERS)
TESTS = python_files("tests")


def functions(name):
    nodes = ast.walk(tree(ROOT / name))
    return [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


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
    long = {
        f"{name}:{function.name}": function.end_lineno - function.lineno + 1
        for name in SOURCES
        for function in functions(name)
        if function.end_lineno - function.lineno + 1 > limit_of(function)
    }
    assert long == {}


def test_modules_say_what_they_are_for():
    silent = [name for name in SOURCES if not ast.get_docstring(tree(ROOT / name))]
    assert silent == []


def test_no_module_is_called_a_drawer():
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert [name for name in SOURCES if Path(name).stem in drawers] == []
