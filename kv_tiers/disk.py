"""Files of KV segments in a folder that the workers of a host share.

A file is written under another name and renamed, so a reader sees all of it or none. Its header
says whose KV it is and carries a checksum of every byte. Nothing is flushed to the medium on
purpose: files survive the process, and what a failing machine tears is found damaged.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from observability.logging import get_logger

log = get_logger(__name__)
Part = bytes | memoryview

_MAGIC = b"BATONKV1"
#: Magic, key, name, number of blocks, bytes of each. A checksum for each block, and the blocks
#: follow.
_HEADER = struct.Struct("<8s32s32sII")
_SUM = struct.Struct("<I")
_SUFFIX = ".kv"
_FILE = re.compile(r"[0-9a-f]{64}\.kv")
#: What a bound counts and evicts: folders of keys, and in them segments, also under their temporary
#: names, and what was written to measure the disk. Everything else belongs to others.
_FOLDER = re.compile(r"[0-9a-f]{32}")
_OWN = re.compile(r"[0-9a-f]{64}\.(kv|[0-9]+-[0-9]+)|probe\.[0-9]+")
#: Eviction leaves this share of the bound.
_LOW_WATER = 0.9
#: Share of the bound that one process writes before it counts all files again.
_COUNT_SHARE = 1 / 32
#: A file under its temporary name for so long was left by a process that was killed.
_STALE_S = 600.0
#: Two changes of a folder within this time may show the same modification time.
_TICK_NS = 50_000_000
#: Bytes that are read to measure the disk, at most.
_PROBE_BYTES = 4 << 20


class DamagedFile(Exception):
    """A file is not what its name says."""


class SegmentFiles:
    """The files of one `key`: one model, dtype, layout and rank. Used from any thread, each method
    from one at a time. Methods raise OSError as the file system does."""

    def __init__(self, root: Path, key: bytes, max_bytes: int) -> None:
        """`max_bytes`: of all files below `root`, of every key."""
        self._root = root
        self._key = key
        self._folder = root / key.hex()[:32]
        self._max_bytes = max_bytes
        self._unseen = max_bytes  # bytes written since all files were counted: count at once
        self._number = 0
        self._listed_at = -1
        self._names: frozenset[bytes] = frozenset()
        self.num_evicted = 0  # since the last `take_evicted`

    def write(self, name: bytes, parts: Sequence[Part]) -> int:
        """Make the file of a segment of blocks of one size; its bytes. Evicts others when there are
        too many."""
        self._number += 1
        temporary = self._folder / f"{name.hex()}.{os.getpid()}-{self._number}"
        head = self._head(name, len(parts), len(parts[0]))
        sums = [_SUM.pack(zlib.crc32(part, zlib.crc32(head))) for part in parts]
        size = sum(map(len, parts))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with open(os.open(temporary, flags, 0o600), "wb", buffering=0) as file:
                _write_all(file.fileno(), [head, *sums, *parts])
            temporary.rename(self._path(name))
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._evict(full=True)
            raise
        self._unseen += size
        if self._unseen > self._max_bytes * _COUNT_SHARE:
            self._evict()
        return size

    def read(self, name: bytes, num_blocks: int, first: int, parts: Sequence[memoryview]) -> bool:
        """Fill `parts` with blocks `first`, ... of a segment of `num_blocks`; False when there is
        no file. Raises DamagedFile, and removes the file, unless they are what was written."""
        path, block_bytes = self._path(name), len(parts[0])
        head = self._head(name, num_blocks, block_bytes)
        begin = len(head) + num_blocks * _SUM.size
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(begin)
                if os.fstat(file.fileno()).st_size != begin + num_blocks * block_bytes:
                    raise DamagedFile(f"{path} is truncated")
                file.seek(begin + first * block_bytes)
                for number, part in enumerate(parts, first):
                    place = len(head) + number * _SUM.size
                    known = header[place : place + _SUM.size]
                    whole = _read_all(file.fileno(), part)
                    if not whole or _SUM.pack(zlib.crc32(part, zlib.crc32(head))) != known:
                        raise DamagedFile(f"{path}: block {number} is damaged")
                if header[: len(head)] != head:
                    raise DamagedFile(f"{path} belongs to another segment")
            os.utime(path)
        except FileNotFoundError:
            return False
        except DamagedFile:
            self.drop(name)
            raise
        return True

    def probe(self) -> tuple[int, float]:
        """Bytes, and the seconds that they take to read from the disk itself, not from its cache:
        of some file, or, without one, of one that is made for it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.scandir(self._folder) as entries:
            found = next((entry.path for entry in entries if _FILE.fullmatch(entry.name)), None)
        made = self._folder / f"probe.{os.getpid()}"
        if found is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            with open(os.open(made, flags, 0o600), "wb", buffering=0) as file:
                _write_all(file.fileno(), [bytes(_PROBE_BYTES)])
                os.fsync(file.fileno())
        try:
            with open(found or made, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                size = min(os.fstat(file.fileno()).st_size, _PROBE_BYTES)
                began = time.monotonic()
                _read_all(file.fileno(), memoryview(bytearray(size)))
                return size, time.monotonic() - began
        finally:
            made.unlink(missing_ok=True)

    def drop(self, name: bytes) -> None:
        with suppress(FileNotFoundError):
            self._path(name).unlink()

    def take_evicted(self) -> int:
        """Files that were evicted since the last call."""
        count, self.num_evicted = self.num_evicted, 0
        return count

    def names(self) -> frozenset[bytes]:
        """Segments that have a file now, of whichever worker."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return frozenset()
        if changed != self._listed_at:
            found = filter(_FILE.fullmatch, os.listdir(self._folder))
            self._names = frozenset(bytes.fromhex(name.removesuffix(_SUFFIX)) for name in found)
            self._listed_at = changed if time.time_ns() - changed > _TICK_NS else -1
        return self._names

    def _path(self, name: bytes) -> Path:
        return self._folder / (name.hex() + _SUFFIX)

    def _head(self, name: bytes, num_blocks: int, block_bytes: int) -> bytes:
        """The first bytes of a file, which the checksum of each block covers, too."""
        return _HEADER.pack(_MAGIC, self._key, name, num_blocks, block_bytes)

    def _evict(self, *, full: bool = False) -> None:
        """Remove the least recently used files, of every key, until the rest is within the bound.
        `full`: the disk has no room for as much as the bound allows."""
        found = []
        for path in self._root.glob("*/*"):
            if not (_FOLDER.fullmatch(path.parent.name) and _OWN.fullmatch(path.name)):
                continue
            with suppress(FileNotFoundError):  # another worker evicts too
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        limit = total * _LOW_WATER if full else self._max_bytes
        self._unseen = 0
        if total <= limit:
            return
        limit = min(limit, self._max_bytes * _LOW_WATER)
        newest = max(when for when, _, _ in found)
        for when, size, path in sorted(found):
            stale = path.suffix != _SUFFIX and when < newest - _STALE_S
            if total <= limit:
                break
            if path.suffix == _SUFFIX or stale:
                with suppress(FileNotFoundError):
                    path.unlink()
                total -= size
                self.num_evicted += 1


def _write_all(file: int, parts: Sequence[Part]) -> None:
    for part in parts:
        rest = memoryview(part)
        while len(rest):
            rest = rest[os.write(file, rest) :]


def _read_all(file: int, part: memoryview) -> bool:
    """False at the end of the file."""
    while len(part):
        count = os.readv(file, [part])
        if not count:
            return False
        part = part[count:]
    return True
