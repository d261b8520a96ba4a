"""The README and the contributor's guide name commands that exist."""

import re
import subprocess
from pathlib import Path

import pytest

from cluster.cli.arguments import make_parser

ROOT = Path(__file__).resolve().parents[2]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if path.is_file()
]


def commands(path):
    """Every `make x` in a code span or a code block of a page."""
    text = path.read_text()
    code = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    return {target for part in code for target in re.findall(r"\bmake ([a-z][a-z-]*)", part)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_name_targets_that_exist(path):
    assert commands(path) <= TARGETS


def test_the_readme_shows_how_to_run_and_how_to_test():
    assert {"demo", "test"} <= commands(ROOT / "README.md")


def test_every_target_is_explained():
    described = re.findall(
        r"^([a-z][a-z-]*):.*## \S", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert set(described) == TARGETS
    phony = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(" ".join(phony).split()) == TARGETS


def test_help_lists_every_target():
    run = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[0] for line in run.splitlines() if line.startswith("  ")} >= TARGETS


def test_ci_calls_the_readme_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_no_page_installs_the_unrelated_package():
    """The package `baton` of the public index is another project."""
    tracked = subprocess.run(
        ["git", "grep", "-nE", r"pip install.* '?baton(\[|'| |$)", "--", ".", ":!tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    assert tracked == ""


LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path):
    targets = [link for link in LINK.findall(path.read_text()) if "://" not in link]
    missing = [link for link in targets if not (path.parent / link).exists()]
    assert missing == []


def baton_commands(path):
    """Every `baton ...` line in a code block of a page, without comments."""
    blocks = re.findall(r"```\n(.*?)```", path.read_text(), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    found = (re.match(r"(?:BATON_\w+=\S+ )*(?:\.venv/bin/)?baton (.+)$", line) for line in lines)
    return [match[1].split() for match in found if match and match[1].isascii()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_show_commands_that_parse(path):
    parser = make_parser()
    for arguments in baton_commands(path):
        arguments = [a.replace("FILE", "deploy/configs/local-cpu.yaml") for a in arguments]
        assert parser.parse_args(arguments).command == arguments[0]


def test_the_readme_shows_the_command_line():
    shown = {arguments[0] for arguments in baton_commands(ROOT / "README.md")}
    assert {"chat", "scale"} <= shown
