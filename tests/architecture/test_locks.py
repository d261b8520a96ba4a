"""The lock files pin exactly, and agree with what the project asks for."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.sources import ROOT, imports_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lock(name):
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", pin) for pin in pins)
    return dict(pin.split("==") for pin in pins)


RUN, DEV, GPU = lock("cpu.txt"), lock("dev.txt"), lock("gpu.txt")


def test_no_package_is_pinned_twice():
    assert not RUN.keys() & DEV.keys()
    assert not RUN.keys() & GPU.keys()


def test_locks_satisfy_the_requirements():
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["models"]]:
        wanted = Requirement(text)
        assert RUN[canonicalize_name(wanted.name)] in wanted.specifier
    for text in extras["gpu"]:
        wanted = Requirement(text)
        assert GPU[canonicalize_name(wanted.name)] in wanted.specifier
    for text in [*extras["test"], *extras["dev"][1:]]:
        wanted = Requirement(text)
        assert {**RUN, **DEV}[canonicalize_name(wanted.name)] in wanted.specifier


def test_no_protobuf_is_allowed_that_is_older_than_the_generated_code():
    """Which refuses to be imported by one."""
    made = (ROOT / "protocol" / "wire" / "inference_pb2.py").read_text()
    (version,) = re.findall(r"^# Protobuf Python Version: ([\d.]+)$", made, re.MULTILINE)
    assert f"protobuf>={version}" in PROJECT["dependencies"]


def test_torch_is_pinned_without_a_build():
    assert re.fullmatch(r"[\d.]+", RUN["torch"])


def imported_roots():
    """Third-party packages that any of our files imports, tests included, with a file that does."""
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"tests", "scripts"}
    for path in ROOT.rglob("*.py"):
        if any(part.startswith((".", "build")) for part in path.relative_to(ROOT).parts):
            continue
        for root in {name.partition(".")[0] for name in imports_of(path)} - ours:
            if root not in sys.stdlib_module_names:
                yield root, str(path.relative_to(ROOT))


#: Imported only where a user has installed them; no check or test needs them.
OPTIONAL = {"matplotlib"}


def test_everything_imported_is_locked():
    """What only happens to be installed here would be missing in a fresh environment."""
    distributions = packages_distributions()
    locked = RUN.keys() | DEV.keys()
    missing = {
        root: path
        for root, path in imported_roots()
        if root not in OPTIONAL
        and not {str(canonicalize_name(d)) for d in distributions.get(root, [root])} & locked
    }
    assert missing == {}
