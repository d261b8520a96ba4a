"""Temporary folders that are removed with their process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_OWNER = "owner"  # a file in each folder, locked as long as the folder's process lives


class ProcessTempdir:
    """A new folder below `parent`, removed when this object or its process ends; after a kill, by
    the next process that makes one there."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(parent)
        # Sweeps skip hidden folders: it gets its name once it is locked.
        hidden = Path(tempfile.mkdtemp(prefix=".", dir=parent))
        lock = os.open(hidden / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = hidden.rename(parent / hidden.name[1:])
        weakref.finalize(self, _remove, self.path, lock)


def ranks_folder() -> Path:
    """Parent of the folders in which ranks of this user's engines meet."""
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}" / "ranks"


def _sweep(parent: Path) -> None:
    """Remove folders of processes that are gone."""
    for folder in parent.iterdir():
        if folder.name.startswith("."):
            continue
        with contextlib.suppress(OSError):  # in use, or swept by another process
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
