"""Lines of the pages are short enough to read side by side with code."""

import re

import pytest

from tests.support.sources import ROOT

MAX_COLUMNS = 110
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/README.md", "deploy/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_short(path):
    """Tables and code cannot be wrapped."""
    prose = FENCED.sub("", path.read_text()).splitlines()
    wrapped = (line for line in prose if not re.match(r" *\||    ", line))
    assert [line for line in wrapped if len(line) > MAX_COLUMNS] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
