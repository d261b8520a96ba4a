"""Words that must not stand in the project: unfinished places, traces of where it was written, and
vocabulary that was replaced (the glossary of docs/architecture.md has what to say instead)."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SELF = Path(__file__).resolve()
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".proto", ".sh", ".json", ""}


def files():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    paths = [ROOT / line for line in listed if line] or list(ROOT.rglob("*.py"))
    return [p for p in paths if p.suffix in TEXT and p.is_file() and p.resolve() != SELF]


FILES = files()


@cache
def text_of(path):
    return path.read_text(errors="replace")


def hits(pattern, paths):
    return [
        f"{path.relative_to(ROOT)}: {match[0].strip()[:80]}"
        for path in paths
        for match in re.finditer(pattern, text_of(path), re.MULTILINE)
    ]


def test_there_is_something_to_look_at():
    assert len(FILES) > 50


@pytest.mark.parametrize(
    "pattern",
    [r"\bTODO\b", r"\bFIXME\b", r"\bXXX\b", r"NotImplementedError"],
)
def test_nothing_is_left_unfinished(pattern):
    sources = [p for p in FILES if p.suffix == ".py" and "_pb2" not in p.stem]
    assert hits(pattern, sources) == []


@pytest.mark.parametrize(
    "pattern",
    [r"(^|[^\w.])/work/", r"/farm/", r"\.library\b", r"(?i)\bsubagents?\b", r"(?i)device tool\b"],
)
def test_no_trace_of_the_workplace(pattern):
    assert hits(pattern, FILES) == []


#: Recorded pages keep the words of their time.
CURRENT = [p for p in FILES if "results" not in p.parts or p.name == "README.md"]
PYTHON = [p for p in CURRENT if p.suffix == ".py" and "_pb2" not in p.stem]
#: Sentences have things as subjects: worker, router, block, transfer.
VAGUE = r"(?i)\b(whoever|whomever|nobody|somebody|everybody|anybody|errands?|doors?)\b"
#: The label `door` of two metrics stays: dashboards use it.
LABEL = re.compile(r"""["'`({, ]door(?=["'`=,)}])""")
#: Parts of identifiers that had a meaning in this project only.
OLD_PARTS = {"errand", "errands", "door", "doors", "party", "outlet", "whoever", "nobody"}
OLD_ARGUMENTS = {"called", "most", "least", "asked", "told", "shown"}


def test_sentences_name_things():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in CURRENT
        for match in re.finditer(VAGUE, LABEL.sub("", text_of(path)))
    ]
    assert found == []


def identifiers(path):
    """Every name that a file binds or uses."""
    for node in ast.walk(ast.parse(text_of(path))):
        for field in ("id", "attr", "name", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def parts_of(identifier):
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def test_identifiers_use_current_words():
    found = {f"{p.relative_to(ROOT)}: {n}" for p in PYTHON for n in identifiers(p)}
    old = sorted(hit for hit in found if parts_of(hit.rpartition(": ")[2]) & OLD_PARTS)
    assert [hit for hit in old if not hit.endswith(": door")] == []


def test_arguments_say_what_they_are():
    found = [
        f"{path.relative_to(ROOT)}: {function.name}({argument.arg})"
        for path in PYTHON
        for function in ast.walk(ast.parse(text_of(path)))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in [*function.args.args, *function.args.kwonlyargs]
        if argument.arg in OLD_ARGUMENTS
    ]
    assert found == []
