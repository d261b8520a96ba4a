"""Who may import whom: the contracts of pyproject.toml, and that they cover every package."""

import re
import subprocess
import sys
import tomllib

import pytest

from tests.support.sources import PACKAGES, ROOT, imports_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_import_contracts_hold():
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as main; main()",
    ]
    run = subprocess.run(
        [*command, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


def test_every_package_is_built_typed_checked_and_under_contract():
    found, tool = set(PACKAGES), PROJECT["tool"]
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} - found == {"benchmarks"}
    assert set(tool["importlinter"]["root_packages"]) == found
    assert set(tool["hatch"]["build"]["targets"]["wheel"]["packages"]) == found
    assert found <= set(tool["mypy"]["packages"])
    layers = tool["importlinter"]["contracts"][0]["layers"]
    assert {part for layer in layers for part in layer.split(" | ")} == found


def test_deprecation_warnings_in_every_package_are_errors():
    (ignored,) = (
        line
        for line in PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"]
        if line.startswith("ignore::DeprecationWarning:")
    )
    pattern = ignored.removeprefix("ignore::DeprecationWarning:")
    assert [name for name in PACKAGES if re.match(pattern, f"{name}.module")] == []
    assert re.match(pattern, "torch.nn")


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "cluster"])
def test_ray_is_imported_by_cluster_alone(package):
    for path in (ROOT / package).rglob("*.py"):
        roots = {name.partition(".")[0] for name in imports_of(path)}
        assert "ray" not in roots, path


def test_private_names_of_others_are_in_one_file_each():
    """Of Ray in cluster.ray_private, of torch in engine.torch_private; ruff (SLF) holds it for
    attributes, with these two as the only exceptions."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.name not in ("ray_private.py", "torch_private.py"):
                private = re.compile(r"(ray|torch)\b.*\._|.*\.internal_kv\b")
                assert [name for name in imports_of(path) if private.match(name)] == [], path
    exempt = {
        place
        for place, rules in PROJECT["tool"]["ruff"]["lint"]["per-file-ignores"].items()
        if "SLF" in rules and not place.startswith(("tests/", "benchmarks/"))
    }
    assert exempt == {"cluster/ray_private.py", "engine/torch_private.py"}


def test_generated_code_is_used_by_the_grpc_front_end_and_clients_only():
    users = {
        path.relative_to(ROOT).with_suffix("").parts[:2]
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.parent.name != "wire"
        and any("_pb2" in name or name == "protocol.wire" for name in imports_of(path))
    }
    assert {user for user in users if user[0] != "baton_client"} <= {
        ("router", "grpc"),
        ("cluster", "cli"),
        ("cluster", "client"),
        ("cluster", "bench"),
    }


def test_nothing_imports_tests_benchmarks_or_examples():
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            roots = {name.partition(".")[0] for name in imports_of(path)}
            assert not roots & {"tests", "benchmarks", "examples", "scripts"}, path


def test_the_router_runs_without_torch_ray_or_transformers():
    """Import every module of the router in a fresh interpreter and see what came along."""
    code = """
import importlib, pkgutil, sys, router
for module in pkgutil.walk_packages(router.__path__, "router."):
    importlib.import_module(module.name)
print(sorted({"torch", "ray", "transformers", "triton"} & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "[]", run.stderr


def test_the_workers_run_without_ray_or_transformers():
    code = """
import importlib, pkgutil, sys
for package in ("engine", "kv_transfer", "worker_runtime", "prefill_worker", "decode_worker"):
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if "kernels" not in module.name and "cuda" not in module.name:
            importlib.import_module(module.name)
unwanted = {"ray", "transformers", "starlette", "prometheus_client"}
print(sorted(unwanted & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "[]", run.stderr
