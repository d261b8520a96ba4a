"""The tiers of one rank: its host memory, its files, and the threads that copy.

Each kind of copy has a thread of its own, so that a load never waits for a store, nor either for a
disk that hangs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from engine.kv.sizing import available_memory
from kv_tiers.commands import Copy, CopyKind, CopyResult
from kv_tiers.config import TierConfig
from kv_tiers.disk import DamagedFile, SegmentFiles
from kv_tiers.memory import HostMemory
from kv_transfer.backends.base import PagedStore
from kv_transfer.data.threads import SerialThreads
from observability.logging import get_logger
from protocol import codec
from protocol.errors import BatonError
from protocol.kv_layout import KVFingerprint, KVLayout

log = get_logger(__name__)
Finish = Callable[[CopyResult], object]
_FREE_SHARE = 16
_CPU_CAP, _GPU_CAP = 1 << 30, 8 << 30
_CGROUP = Path("/sys/fs/cgroup")
_JOIN_TIMEOUT_S = 5.0
#: Kinds of copies that share a thread with another kind.
_THREADS = {
    CopyKind.OPEN: CopyKind.STORE,
    CopyKind.DROP: CopyKind.WRITE,
    CopyKind.PROBE: CopyKind.WRITE,
}
_NUMBERS = {kind: number for number, kind in enumerate(CopyKind)}
#: A disk that is full fails many copies a second: each kind is logged once in so long.
_LOG_EVERY_S = 60.0


class RankTiers:
    """One rank's end of all copies. `submit`, `execute` and `close` may be called from any
    thread."""

    def __init__(self, pool: PagedStore, config: TierConfig) -> None:
        self._pool = pool
        self._config = config
        self._segment_blocks = segment_blocks(config, pool.block_size)
        self._memory: HostMemory | None = None
        self._files: SegmentFiles | None = None
        self._threads = SerialThreads("kv-tier", pool.device)
        self._logged: dict[CopyKind, tuple[float, int]] = {}  # when, and failures since

    def submit(self, copy: Copy, finish: Finish) -> None:
        """Start a copy; `finish` is called with its result, once, in any thread."""
        kind = _THREADS.get(copy.kind, copy.kind)
        self._threads.put(_NUMBERS[kind], lambda: finish(self._run(copy)))

    def execute(self, command: bytes) -> Future[bytes]:
        """The same for an encoded Copy; the future yields an encoded CopyResult."""
        answer: Future[bytes] = Future()
        answer.set_running_or_notify_cancel()
        self.submit(
            codec.decode(Copy, command), lambda result: answer.set_result(codec.encode(result))
        )
        return answer

    def list_files(self, finish: Callable[[frozenset[bytes]], object]) -> None:
        """Call `finish` with the names of the segments on disk, in any thread."""

        def run() -> None:
            names: frozenset[bytes] = frozenset()
            if self._files is not None:
                with suppress(OSError):
                    names = self._files.names()
            finish(names)

        self._threads.put(_NUMBERS[CopyKind.WRITE], run)

    def close(self) -> None:
        """End all threads, then free the memory, unless a copy hangs."""
        self._threads.close()
        if self._threads.join(_JOIN_TIMEOUT_S) and self._memory is not None:
            self._memory.close()

    def _run(self, copy: Copy) -> CopyResult:
        began = time.monotonic()
        try:
            if copy.kind is CopyKind.PROBE:
                return self._probe()
            ok = self._copy(copy)
        except DamagedFile as error:
            log.warning("a KV file is damaged: removed", extra={"why": str(error)})
            return CopyResult(ok=False, damaged=True)
        except (OSError, RuntimeError, BatonError) as error:
            self._log(copy.kind, error)
            return CopyResult(ok=False)
        size = 0 if self._memory is None else self._memory.slot_bytes
        writes = copy.kind is CopyKind.WRITE and self._files is not None
        return CopyResult(
            ok=ok,
            num_evicted=self._files.take_evicted() if writes and self._files else 0,
            num_bytes=len(copy.slots) * size if ok else 0,
            seconds=time.monotonic() - began,
        )

    def _log(self, kind: CopyKind, error: Exception) -> None:
        """Copies of a kind run one at a time."""
        logged_at, unlogged = self._logged.get(kind, (-math.inf, 0))
        if time.monotonic() < logged_at + _LOG_EVERY_S:
            self._logged[kind] = logged_at, unlogged + 1
            return
        self._logged[kind] = time.monotonic(), 0
        said = {"copy": kind.value, "why": f"{error!r}"[:300], "failed_before": unlogged}
        log.warning("a KV copy failed", extra=said)

    def _probe(self) -> CopyResult:
        if self._files is None:
            return CopyResult(ok=False)
        num_bytes, seconds = self._files.probe()
        return CopyResult(ok=True, num_bytes=num_bytes, seconds=seconds)

    def _copy(self, copy: Copy) -> bool:
        if copy.kind is CopyKind.OPEN:
            self._memory = HostMemory(self._pool, copy.number)
            if self._config.disk_path:
                root, limit = Path(self._config.disk_path), self._config.disk_bytes
                self._files = SegmentFiles(root, copy.name, limit)
            return True
        memory = self._memory
        if memory is None:
            return False
        match copy.kind:
            case CopyKind.STORE:
                memory.store(copy.blocks, copy.slots)
            case CopyKind.LOAD:
                memory.load(copy.blocks, copy.slots)
            case _:
                return self._move_file(copy, memory)
        return True

    def _move_file(self, copy: Copy, memory: HostMemory) -> bool:
        files = self._files
        if files is None:
            return False
        parts = [memory.slots[slot].reshape(-1).data for slot in copy.slots]
        match copy.kind:
            case CopyKind.WRITE:
                files.write(copy.name, parts)
            case CopyKind.READ:
                return files.read(copy.name, self._segment_blocks, copy.first, parts)
            case _:
                files.drop(copy.name)
        return True


def segment_blocks(config: TierConfig, block_size: int) -> int:
    """Blocks of one file."""
    return max(1, config.segment_tokens // block_size)


def files_key(layout: KVLayout, fingerprint: KVFingerprint, rank: int, num_blocks: int) -> bytes:
    """Whose files a rank reads: everything on which the bytes of a segment of `num_blocks`
    depend."""
    first, last = layout.rank_heads[rank]
    shape = layout.num_layers, layout.head_dim, layout.block_size, first, last, num_blocks
    return sha256(codec.encode(fingerprint) + repr((shape, layout.dtype)).encode()).digest()


def num_host_slots(config: TierConfig, layout: KVLayout, *, on_gpu: bool) -> int:
    """Slots of each rank's host memory; 0: no tiers."""
    num_bytes = config.host_bytes
    if num_bytes is None:
        share = min(_GPU_CAP if on_gpu else _CPU_CAP, _free_memory() // _FREE_SHARE)
        num_bytes = share // layout.tp_size
    return num_bytes // slot_bytes(layout)


def _free_memory() -> int:
    """Free memory of the host, or of the container if that has less."""
    free = available_memory()
    with suppress(OSError, ValueError):  # no cgroup of version 2, or one without a limit
        read = {
            name: (_CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        }
        (cached,) = (
            line for line in read["stat"].splitlines() if line.startswith("inactive_file ")
        )
        used = int(read["current"]) - int(cached.split()[1])
        free = min(free, int(read["max"]) - used)
    return max(0, free)


def slot_bytes(layout: KVLayout) -> int:
    """Bytes of one block on the rank that holds most KV heads."""
    heads = max(last - first for first, last in layout.rank_heads)
    return layout.token_bytes() // layout.num_kv_heads * heads * layout.block_size
