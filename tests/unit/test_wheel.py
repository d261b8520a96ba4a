"""The wheel: built, looked into, and run beside another distribution's package `cluster`."""

from __future__ import annotations

import ast
import csv
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from scripts.wheel import nested_imports
from tests.support.sources import PACKAGES, ROOT

#: Without -S, the editable installation would bring the repository's packages.
RUN = """
import sys
sys.path[1:1] = {paths}
import cluster
assert cluster.WHOSE == "another's"
from baton_llm.cluster.cli import main
sys.exit(main({arguments}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages, with the wheel and a package named like one of Baton's."""
    folder = tmp_path_factory.mktemp("wheel")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        wheel = folder / build_wheel(str(folder))
    finally:
        os.chdir(before)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        archive.extractall(folder / "site")
    other = folder / "site" / "cluster"
    other.mkdir()
    (other / "__init__.py").write_text('WHOSE = "another\'s"\n')
    return folder / "site"


def test_everything_is_below_one_package(site: Path) -> None:
    (info,) = (path.name for path in site.iterdir() if path.name.endswith(".dist-info"))
    assert {path.name for path in site.iterdir()} == {"baton_llm", "cluster", info}
    parts = {path.name for path in (site / "baton_llm").iterdir()}
    assert parts == {*PACKAGES, "deploy", "__init__.py", "py.typed"}
    with (site / info / "RECORD").open(newline="") as file:
        listed = {row[0]: row[2] for row in csv.reader(file)}
    for name, size in listed.items():
        assert not size or (site / name).stat().st_size == int(size)
    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert files - {"cluster/__init__.py"} == set(listed)
    assert {
        "baton_llm/protocol/wire/inference.proto",
        "baton_llm/protocol/wire/inference_pb2.pyi",
        "baton_llm/deploy/configs/local-cpu.yaml",
        "baton_llm/deploy/templates/chatml_tools.jinja",
        "baton_llm/deploy/monitoring/grafana-dashboard.json",
        "baton_llm/deploy/ray/onprem.yaml",
    } <= files


def test_no_module_imports_a_package_of_the_repository(site: Path) -> None:
    for path in (site / "baton_llm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & set(PACKAGES), path


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(site), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return subprocess.run(
        [sys.executable, "-S", "-c", RUN.format(paths=paths, arguments=list(arguments))],
        cwd=site,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_runs_beside_another_package_of_the_same_name(site: Path) -> None:
    assert run(site, "--version").stdout == "baton 0.1.0\n"
    refused = run(site, "up", "--set", "prefill.replicas=many")
    assert "prefill.replicas: expected a whole number" in refused.stderr
    unknown = run(site, "up", "nowhere")
    assert "no configuration file nowhere; Baton ships gpu-1p1d, " in unknown.stderr


@pytest.mark.parametrize(
    ("source", "nested"),
    [
        ("from cluster.a import b\n", "from baton_llm.cluster.a import b\n"),
        ("if x:\n    from cluster import b\n", "if x:\n    from baton_llm.cluster import b\n"),
        ("import cluster.a\n", "import baton_llm.cluster.a\n"),
        ("from .cluster import b\n", "from .cluster import b\n"),
        ("import clusters\n", "import clusters\n"),
        ("'from cluster import x'\n", "'from cluster import x'\n"),
    ],
)
def test_imports_follow(source: str, nested: str) -> None:
    assert nested_imports(source, ["cluster"], "x.py") == nested


@pytest.mark.parametrize(
    "source", ["import cluster\nprint(cluster.x)\n", "run('-m', 'cluster.local.ray_head')\n"]
)
def test_what_cannot_follow_fails_the_build(source: str) -> None:
    with pytest.raises(ValueError, match=r"x\.py"):
        nested_imports(source, ["cluster"], "x.py")
