"""Baton's directories on this machine, and file locks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def baton_home() -> Path:
    """`BATON_HOME`, by default `~/.cache/baton`. Not created here."""
    return Path(os.environ.get("BATON_HOME") or "~/.cache/baton").expanduser().absolute()


def import_root() -> Path:
    """The folder from which Baton's modules are imported: of a clone, or site-packages."""
    return Path(__file__).parents[__name__.count(".")]


def models_dir() -> Path:
    return baton_home() / "models"


def run_dir() -> Path:
    """The directory of the running cluster's state and logs."""
    return baton_home() / "run"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting for it. The kernel releases it when the process
    ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
