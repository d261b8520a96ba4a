"""Telling that a file has changed."""

from __future__ import annotations

from pathlib import Path

#: Differs after any change that a writer or a mounted secret makes.
Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp:
    """What the file is now. Raises OSError when it cannot be told."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
