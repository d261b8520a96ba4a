"""Files of segments: whole or not there, of their own model only, within a bound."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_tiers import disk, rank_tiers
from kv_tiers.commands import Copy, CopyKind, CopyResult
from kv_tiers.config import TierConfig
from kv_tiers.disk import DamagedFile, SegmentFiles
from kv_tiers.memory import HostMemory
from kv_tiers.rank_tiers import RankTiers
from tests.support.device_tiers import DevicePool
from tests.support.held import Held

KEY, NAME = bytes(range(32)), bytes([7] * 32)
BLOCKS = [bytes([i]) * 1000 for i in range(4)]


def read(files: SegmentFiles, first: int = 0, count: int = 4, name: bytes = NAME) -> list[bytes]:
    """Blocks of a segment; none when there is no file."""
    parts = [bytearray(1000) for _ in range(count)]
    found = files.read(name, 4, first, [memoryview(part) for part in parts])
    return [bytes(part) for part in parts] if found else []


@pytest.fixture
def files(tmp_path: Path) -> SegmentFiles:
    return SegmentFiles(tmp_path / "kv", KEY, 1 << 20)


def path_of(files: SegmentFiles) -> Path:
    (path,) = files._folder.iterdir()
    return path


def test_the_disk_is_measured_with_files_and_without(
    files: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes, seconds = files.probe()
    assert num_bytes == 4 << 20
    assert seconds > 0
    assert not list(files._folder.iterdir())  # what was made for it is gone
    files.write(NAME, BLOCKS)
    assert files.probe()[0] == path_of(files).stat().st_size
    assert read(files) == BLOCKS
    real = disk._read_all

    def slow(file: int, part: memoryview) -> bool:
        time.sleep(0.05)
        return real(file, part)

    monkeypatch.setattr(disk, "_read_all", slow)
    assert files.probe()[1] >= 0.05


def test_what_was_written_is_read_whole_or_in_part(files: SegmentFiles) -> None:
    assert read(files) == []
    assert files.names() == frozenset()
    files.write(NAME, BLOCKS)
    assert read(files) == BLOCKS
    assert read(files, first=1, count=2) == BLOCKS[1:3]
    assert files.names() == {NAME}
    assert stat.S_IMODE(path_of(files).stat().st_mode) == 0o600
    assert stat.S_IMODE(files._folder.stat().st_mode) == 0o700
    files.drop(NAME)
    assert read(files) == []
    assert files.names() == frozenset()


def test_a_change_at_the_moment_of_a_look_is_seen(files: SegmentFiles) -> None:
    files.write(NAME, BLOCKS)
    times = files._folder.stat().st_mtime_ns
    assert files.names() == {NAME}
    files.drop(NAME)
    os.utime(files._folder, ns=(times, times))  # the clock of the folder has not ticked
    assert files.names() == frozenset()


def test_another_process_and_only_one_of_the_same_model_finds_it(
    files: SegmentFiles, tmp_path: Path
) -> None:
    files.write(NAME, BLOCKS)
    assert read(SegmentFiles(tmp_path / "kv", KEY, 1 << 20)) == BLOCKS
    other = SegmentFiles(tmp_path / "kv", KEY[::-1], 1 << 20)
    assert read(other) == []
    assert other.names() == frozenset()
    path_of(files).rename(files._folder / "copied")
    other._folder.mkdir()
    (files._folder / "copied").rename(other._path(NAME))
    with pytest.raises(DamagedFile):
        read(other)


@pytest.mark.parametrize("place", [0, 8, 40, 72, 76, 80, 90, 96, 1095, 4095])
def test_a_flipped_bit_anywhere_is_found(files: SegmentFiles, place: int) -> None:
    files.write(NAME, BLOCKS)
    path = path_of(files)
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        read(files)
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 50, 95, 96, 2000, 4095, 5000])
def test_a_file_of_the_wrong_length_is_no_hit(files: SegmentFiles, length: int) -> None:
    files.write(NAME, BLOCKS)
    path = path_of(files)
    path.write_bytes(path.read_bytes()[:length].ljust(length, b"x"))
    with pytest.raises(DamagedFile):
        read(files, first=3, count=1)
    assert not path.exists()


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """Files of others below the same folder neither go nor count."""
    files = SegmentFiles(tmp_path, KEY, 50_000)
    names = [bytes([i] * 32) for i in range(13)]
    foreign = [tmp_path / "home" / f"{NAME.hex()}.kv", files._folder / "notes.txt"]
    killed = [files._folder / f"{NAME.hex()}.7-1", files._folder / "probe.7"]
    for path in (*foreign, *killed):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(60_000 if path in foreign else 1))
        os.utime(path, (0, 0))
    for i, name in enumerate(names[:12]):
        files.write(name, BLOCKS)
        os.utime(files._path(name), (i, i))
    read(files, name=names[0])
    files.write(names[12], BLOCKS)
    left = files.names()
    assert names[0] in left
    assert names[12] in left
    assert names[1] not in left
    assert 40_000 < sum(files._path(name).stat().st_size for name in left) <= 50_000
    assert files.num_evicted == 13 - len(left) + len(killed)
    assert all(path.exists() for path in foreign)
    assert not any(path.exists() for path in killed)


def test_a_full_disk_makes_room_and_leaves_nothing_half_written(
    files: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [bytes([i] * 32) for i in range(20)]
    for name in names:
        files.write(name, BLOCKS)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_write_all", full)
        with pytest.raises(OSError, match="full"):
            files.write(NAME, BLOCKS)
    assert len(list(files._folder.iterdir())) == len(files.names()) == 18
    files.write(NAME, BLOCKS)
    assert read(files) == BLOCKS


def test_a_folder_that_is_deleted_comes_back_with_the_next_file(files: SegmentFiles) -> None:
    files.write(NAME, BLOCKS)
    path_of(files).unlink()
    files._folder.rmdir()
    assert read(files) == []
    assert files.names() == frozenset()
    files.write(NAME, BLOCKS)
    assert read(files) == BLOCKS


def test_a_rank_writes_lists_and_reads_its_files(tmp_path: Path) -> None:
    """A block goes to disk and back into another one; what is not there is not read."""
    pool = DevicePool(torch.arange(64, dtype=torch.int32).reshape(2, 4, 4, 2))
    config = TierConfig(disk_path=str(tmp_path), disk_bytes=1 << 20, segment_tokens=8)
    tiers = RankTiers(pool, config)

    def run(kind: CopyKind, **fields: Any) -> CopyResult:
        done: Future[CopyResult] = Future()
        tiers.submit(Copy(kind=kind, **{"number": 1, "slots": (), **fields}), done.set_result)
        return done.result(60)

    def listed() -> frozenset[bytes]:
        done: Future[frozenset[bytes]] = Future()
        tiers.list_files(done.set_result)
        return done.result(60)

    assert not run(CopyKind.STORE, blocks=(0,), slots=(0,)).ok  # nothing is open
    assert listed() == frozenset()
    assert run(CopyKind.OPEN, number=5, name=KEY).ok
    assert listed() == frozenset()
    assert run(CopyKind.STORE, blocks=(0, 1), slots=(0, 1)).num_bytes == 128
    assert run(CopyKind.WRITE, name=NAME, slots=(0, 1)).ok
    assert listed() == {NAME}
    assert not run(CopyKind.READ, name=NAME[::-1] + b"x", slots=(3,)).ok
    assert run(CopyKind.READ, name=NAME, first=1, slots=(3,)).ok
    assert run(CopyKind.LOAD, blocks=(2,), slots=(3,)).ok
    assert torch.equal(pool.data[:, 2], pool.data[:, 1])
    (path,) = tmp_path.glob("*/*")
    path.write_bytes(path.read_bytes()[:-1])
    damaged = run(CopyKind.READ, name=NAME, first=1, slots=(3,))
    assert (damaged.ok, damaged.damaged, path.exists()) == (False, True, False)
    assert run(CopyKind.WRITE, name=NAME, slots=(0, 1)).ok
    assert run(CopyKind.DROP, name=NAME).ok
    assert not path.exists()
    tiers.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_memory_is_freed_once_no_copy_is_in_it(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, freed = Held(), []

    class Memory(HostMemory):
        def store(self, *_: object) -> None:
            ended()
            freed.append("copied")

        def close(self) -> None:
            freed.append("freed")
            super().close()

    monkeypatch.setattr(rank_tiers, "HostMemory", Memory)
    monkeypatch.setattr(rank_tiers, "_JOIN_TIMEOUT_S", 0.05 if hangs else 60.0)
    RankTiers(DevicePool(torch.zeros(1, 1, 4, 2)), TierConfig()).close()  # nothing is open
    tiers = RankTiers(DevicePool(torch.zeros(1, 1, 4, 2)), TierConfig())
    done: list[Future[CopyResult]] = [Future(), Future()]
    tiers.submit(Copy(number=2, kind=CopyKind.OPEN, slots=(), name=KEY), done[0].set_result)
    assert done[0].result(60).ok
    tiers.submit(Copy(number=1, kind=CopyKind.STORE, blocks=(0,), slots=(0,)), done[1].set_result)
    assert ended.begun()
    if not hangs:
        threading.Timer(0.05, ended.release).start()
    tiers.close()
    assert freed == ([] if hangs else ["copied", "freed"])
    ended.release()
    assert done[1].result(60).ok
