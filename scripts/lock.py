"""Write constraints/*.txt from the packages installed beside this Python (`make lock`).

To move to newer versions: `pip install --upgrade ...` in the environment, test, then `make lock`.
With `--gpu` only gpu.txt: what pip resolves for the default build of the locked torch, without
downloading the packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
BUILD = ("hatchling", "editables")
CPU_HEAD = """\
# Everything that running Baton on a CPU needs, exactly. Made by `make lock`; do not edit.
#   pip install --no-deps -r constraints/cpu.txt        installs it without resolving anything
#   pip install -c constraints/cpu.txt .                resolves to the same versions
# torch: take the CPU build (+cpu); scripts/setup_env.py knows where to look for it.
"""
DEV_HEAD = """\
# What tests and checks need beyond cpu.txt, exactly. Made by `make lock`; do not edit.
"""


GPU_HEAD = """\
# What GPUs need beyond cpu.txt, exactly, on x86-64: torch's default build and what that asks for.
# Made by `python scripts/lock.py --gpu`; do not edit.
#   pip install -c constraints/cpu.txt -c constraints/gpu.txt 'baton_llm[models,gpu]'
"""
#: As for the images of deploy/docker.
_PYTHON = ("--python-version", "3.12")


def closure(roots: Iterable[str]) -> dict[str, str]:
    """Name and version of all dependencies of `roots`, as installed."""
    found: dict[tuple[str, frozenset[str]], str] = {}
    todo = [Requirement(root) for root in roots]
    while todo:
        wanted = todo.pop()
        key = (str(canonicalize_name(wanted.name)), frozenset(wanted.extras))
        if key in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        package = metadata.distribution(wanted.name)
        found[key] = package.version.split("+")[0]
        extras = {"", *wanted.extras}
        for requirement in map(Requirement, package.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                requirement.marker = None
                todo.append(requirement)
    return {name: version for (name, _), version in found.items()}


def main() -> None:
    """Write the lock for GPUs, or both others."""
    if "--gpu" in sys.argv[1:]:
        locked = read("cpu")
        found = resolved(f"torch=={locked['torch']}")
        write("gpu", GPU_HEAD, {name: found[name] for name in found.keys() - locked.keys()})
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    run = closure([*project["dependencies"], *extras["models"], *BUILD])
    tools = [tool for tool in extras["dev"] if not tool.startswith("baton-llm")]
    more = closure([*extras["test"], *tools])
    write("cpu", CPU_HEAD, run)
    write("dev", DEV_HEAD, {name: more[name] for name in more.keys() - run.keys()})


def resolved(requirement: str) -> dict[str, str]:
    """Name and version of what pip would install for a requirement, from the package index."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--target", folder]
        options += [*_PYTHON, "-c", str(ROOT / "constraints" / "cpu.txt")]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--report", str(report)]
        # Without this machine's settings, which may lead to a build for CPUs.
        env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        subprocess.run([*command, *options, requirement], env=env, check=True)
        installs = json.loads(report.read_text())["install"]
    return {
        str(canonicalize_name(each["metadata"]["name"])): each["metadata"]["version"]
        for each in installs
    }


def read(name: str) -> dict[str, str]:
    """The versions of a lock."""
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def write(name: str, head: str, versions: dict[str, str]) -> None:
    """One lock, sorted by name."""
    lines = "".join(f"{package}=={version}\n" for package, version in sorted(versions.items()))
    (ROOT / "constraints" / f"{name}.txt").write_text(head + lines)


if __name__ == "__main__":
    main()
