"""Decision records are numbered once each, and say their number."""

from __future__ import annotations

from tests.support.sources import ROOT

RECORDS = sorted((ROOT / "docs" / "adr").glob("*.md"))


def test_every_number_is_used_once_and_none_is_left_out():
    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, len(RECORDS) + 1))


def test_titles_say_the_number():
    for path in RECORDS:
        assert path.read_text().startswith(f"# {int(path.name[:4])}. "), path.name
