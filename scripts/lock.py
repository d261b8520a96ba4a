"""Write constraints/*.txt from the packages installed beside this Python (`make lock`).

To move to newer versions: `pip install --upgrade ...` in the environment, test, then `make lock`.
"""

from __future__ import annotations

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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    run = closure([*project["dependencies"], *extras["models"], *BUILD])
    tools = [tool for tool in extras["dev"] if not tool.startswith("baton-llm")]
    more = closure([*extras["test"], *tools])
    write("cpu", CPU_HEAD, run)
    write("dev", DEV_HEAD, {name: more[name] for name in more.keys() - run.keys()})


def write(name: str, head: str, versions: dict[str, str]) -> None:
    """One lock, sorted by name."""
    lines = "".join(f"{package}=={version}\n" for package, version in sorted(versions.items()))
    (ROOT / "constraints" / f"{name}.txt").write_text(head + lines)


if __name__ == "__main__":
    main()
