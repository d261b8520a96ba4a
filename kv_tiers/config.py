"""Sizes of the tiers of one worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Bytes that a rank stages on its GPU at a time, and how many such portions are in flight in each
#: direction: with less the copy engine waits for the thread, and with more other copies of the
#: process wait for the whole load.
PORTION_BYTES = 32 << 20
STAGED_PORTIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Where KV goes that the pool evicts, and how much of it.

    host_bytes: host memory of each rank, pinned beside a GPU; None: all ranks of a worker together
        take a sixteenth of what is free, at most 1 GiB on CPUs and 8 GiB on GPUs; 0: no tiers.
    disk_path: folder of files that all workers of a host share; empty: none. A file is read by
        workers of the same model, dtype and layout only.
    disk_bytes: bound of all files below `disk_path`; the least recently used go first.
    segment_tokens: tokens of one file.
    peers: whether the worker takes KV of a prompt's beginning from others that have it, and lends
        them its own.
    """

    host_bytes: int | None = None
    disk_path: str = ""
    disk_bytes: int = 64 << 30
    segment_tokens: int = 256
    peers: bool = True

    def __post_init__(self) -> None:
        if self.host_bytes is not None and self.host_bytes < 0:
            raise ValueError(f"host_bytes must be at least 0, got {self.host_bytes}")
        for name in ("disk_bytes", "segment_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.disk_path:
            if not Path(self.disk_path).is_absolute():
                raise ValueError(f"disk_path must be absolute, got {self.disk_path!r}")
            if self.host_bytes == 0:
                raise ValueError("disk_path needs host_bytes: files pass through host memory")

    @property
    def device_memory_bytes(self) -> int:
        """GPU memory of a rank through which KV passes."""
        return 0 if self.host_bytes == 0 else 2 * STAGED_PORTIONS * PORTION_BYTES
