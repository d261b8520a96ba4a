"""The product's structure stays within its limits (docs/architecture.md)."""

import subprocess
import sys

import pytest

from scripts import structure
from tests.support.sources import ROOT


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A product of five modules, and its structure."""
    files = {
        "one/__init__.py": "",
        "one/a.py": "from one import b\nclass Same: ...\n",
        "one/b.py": "def late():\n    import one.a\n",
        "two/__init__.py": "",
        "two/c.py": "from one.a import Same as Other\nclass _Same: ...\n",
    }
    root = tmp_path_factory.mktemp("tree")
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return structure.Structure(structure.read_modules(["one", "two"], root=root))


def test_imports_inside_functions_count_as_cycles(tree):
    assert tree.cycles == [["one.a", "one.b"]]


def test_modules_with_one_importer(tree):
    assert tree.single_importer == {"one.b": "one.a"}


def test_private_classes_share_names_with_public_ones(tree):
    assert tree.ambiguous_classes == {"Same": ["one.a", "two.c"]}


def test_sizes(tree):
    assert (tree.lines, len(tree.modules), tree.functions, tree.full_folders) == (6, 5, 1, {})


def test_figures_are_within_their_limits():
    """In a process of its own: threads are traced from their start."""
    run = subprocess.run(
        [sys.executable, "scripts/structure.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
