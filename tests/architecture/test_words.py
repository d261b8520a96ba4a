"""What must not stand in the project: unfinished places, and traces of where it was written."""

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
    sources = [p for p in FILES if p.suffix == ".py" and not p.stem.endswith("_pb2")]
    assert hits(pattern, sources) == []


@pytest.mark.parametrize(
    "pattern",
    [r"(^|[^\w.])/work/", r"/farm/", r"\.library\b", r"(?i)\bsubagents?\b", r"(?i)device tool\b"],
)
def test_no_trace_of_the_workplace(pattern):
    assert hits(pattern, FILES) == []
