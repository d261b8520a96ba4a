"""A name for the content of a checkpoint: SHA-256 over every byte of every tensor.

Computed once and kept beside the models, under the identity of the files (path, size, time of
change, inode) and the places of the tensors, so that later starts read a line instead of the
weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_READ_BYTES = 1 << 22
#: Smaller checkpoints are hashed at each start: it takes a tenth of a second.
_KEPT_BYTES = 1 << 28
_DIGEST = re.compile("[0-9a-f]{32}")
_THREADS = 4  # hashing releases the interpreter's lock


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Where a tensor lies: `size` bytes of `path` from `offset`. `kind`: its dtype and shape."""

    path: Path
    offset: int
    size: int
    kind: str


def checkpoint_digest(tensors: Mapping[str, TensorBytes]) -> str:
    """32 hexadecimal digits, equal for equal weights however they are sharded into files."""
    if sum(tensor.size for tensor in tensors.values()) < _KEPT_BYTES:
        return _compute(tensors)
    kept = _kept_at(tensors)
    with suppress(OSError):  # a home that cannot be written to: computed at each start
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one host: one computes, the others read
            digest = kept.read_text(encoding="utf-8", errors="replace") if kept.exists() else ""
            if _DIGEST.fullmatch(digest):  # a crash of the host may leave an empty file
                return digest
            digest = _compute(tensors)
            scratch = kept.with_suffix(f".{os.getpid()}")
            scratch.write_text(digest, encoding="ascii")
            scratch.replace(kept)
            return digest
    return _compute(tensors)


def _kept_at(tensors: Mapping[str, TensorBytes]) -> Path:
    # The time of change is the inode's: tools that copy set the time of modification back.
    identity = hashlib.sha256()
    for path in sorted({tensor.path for tensor in tensors.values()}):
        stat = path.stat()
        identity.update(
            f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} "
            f"{stat.st_ino}\n".encode()
        )
    for name, tensor in sorted(tensors.items()):
        place = f"{tensor.path.name} {tensor.offset} {tensor.size} {tensor.kind}"
        identity.update(f"{name} {place}\n".encode())
    home = Path(os.environ.get("BATON_HOME", "~/.cache/baton")).expanduser()
    return home / "digests" / f"{identity.hexdigest()[:32]}.sha256"


def _compute(tensors: Mapping[str, TensorBytes]) -> str:
    names = sorted(tensors)
    with ThreadPoolExecutor(_THREADS) as threads:
        parts = list(threads.map(lambda name: _hash(tensors[name]), names))
    whole = hashlib.sha256()
    for name, part in zip(names, parts, strict=True):
        whole.update(f"{name} {tensors[name].kind}\n".encode() + part)
    return whole.hexdigest()[:32]


def _hash(tensor: TensorBytes) -> bytes:
    digest, left = hashlib.sha256(), tensor.size
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        while left and (data := file.read(min(_READ_BYTES, left))):
            digest.update(data)
            left -= len(data)
    return digest.digest()
