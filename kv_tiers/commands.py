"""Copies that the step thread orders from every rank, and their results."""

from __future__ import annotations

from enum import StrEnum

from protocol.message import Message


class Tier(StrEnum):
    """Where KV is held; also a label of the metrics."""

    GPU = "gpu"  # the worker's pool, on a CPU engine too
    HOST = "host"
    DISK = "disk"
    PEER = "peer"  # another worker's pool or host memory


class CopyKind(StrEnum):
    """What a copy does."""

    OPEN = "open"  # take host memory for `number` slots; `name` is the key of the rank's files
    STORE = "store"  # pool -> host
    LOAD = "load"  # host -> pool
    WRITE = "write"  # host -> disk
    READ = "read"  # disk -> host
    DROP = "drop"  # remove a file
    PROBE = "probe"  # read some file, to measure the disk


class Copy(Message):
    """Copy blocks[i] to or from slots[i], or slots, in order, to or from blocks `first`, ... of the
    file of segment `name`; a write has all of a segment. Every rank does it for its own slice."""

    number: int
    kind: CopyKind
    blocks: tuple[int, ...] = ()
    name: bytes = b""
    first: int = 0
    slots: tuple[int, ...]


class CopyResult(Message):
    """What one rank did. `ok`: all of it; otherwise nothing of it counts. `damaged`: the file was
    not what its name says, and is gone. `seconds`: without the time in queues. `num_evicted`: files
    that made room for others."""

    ok: bool
    damaged: bool = False
    num_evicted: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


def joined(results: list[CopyResult]) -> CopyResult:
    """The result of all ranks: as good as the worst, as slow as the slowest."""
    return CopyResult(
        ok=all(result.ok for result in results),
        damaged=any(result.damaged for result in results),
        num_evicted=sum(result.num_evicted for result in results),
        num_bytes=sum(result.num_bytes for result in results),
        seconds=max(result.seconds for result in results),
    )
