"""Copies through staging memory, without a GPU: streams are queues that run in any order that their
events allow, and as late as they may."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from engine.config import EngineConfig
from kv_tiers import memory
from kv_tiers.config import TierConfig
from kv_tiers.memory import Portion, portions
from kv_transfer.config import TransferConfig
from kv_transfer.cuda.driver import DriverError
from worker_runtime import ranks

LAYERS, BLOCKS, SLOTS = 3, 60, 50
FAILED = 1


def test_portions_are_runs_of_slots() -> None:
    assert list(portions([], 4)) == []
    assert list(portions([7], 4)) == [Portion(0, 1, ((7, 1),))]
    assert list(portions([0, 1, 2, 3, 4, 5], 4)) == [
        Portion(0, 4, ((0, 4),)),
        Portion(4, 2, ((4, 2),)),
    ]
    assert list(portions([3, 4, 9, 11, 12, 13], 5)) == [
        Portion(0, 5, ((3, 2), (9, 1), (11, 2))),
        Portion(5, 1, ((13, 1),)),
    ]
    assert list(portions([5, 5, 4], 3)) == [Portion(0, 3, ((5, 1), (5, 1), (4, 1)))]


@pytest.mark.parametrize(
    ("tiers", "spare"), [(TierConfig(), 128 << 20), (TierConfig(host_bytes=0), 0)]
)
def test_a_worker_leaves_room_for_what_is_staged(
    tiers: TierConfig, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[EngineConfig] = []

    def build(config: EngineConfig, _: object) -> object:
        built.append(config)
        return SimpleNamespace(warmup=lambda: None)

    monkeypatch.setattr(ranks, "build_executor", build)
    transfer = TransferConfig()
    engine = EngineConfig(model_path="none", spare_bytes=5)
    ranks.load_ranks(engine, transfer, tiers, None)
    assert built[0].spare_bytes == 5 + transfer.device_memory_bytes + spare


class Stream:
    """A queue of work, of records of events (their marks) and of waits for them."""

    def __init__(self, device: Device, number: int) -> None:
        self.cuda_stream = number
        self._device = device
        self.queue: deque[Callable[[], bool]] = deque()

    def put(self, work: Callable[[], object]) -> None:
        def run() -> bool:
            work()
            return True

        self.queue.append(run)


class Device:
    """Streams, whose work runs when a thread waits for some of it."""

    def __init__(self, seed: int) -> None:
        self.streams: dict[int, Stream] = {}
        self.fails_at = -1
        self.kept: list[object] = []
        self._random = random.Random(seed)
        self._num_copies = 0

    def stream(self, _: torch.device) -> Stream:
        number = len(self.streams) + 1
        self.streams[number] = Stream(self, number)
        return self.streams[number]

    def run_some(self) -> bool:
        """Run one thing of a stream that does not wait; false when all do, or are empty."""
        busy = [stream for stream in self.streams.values() if stream.queue]
        for stream in self._random.sample(busy, len(busy)):
            if stream.queue[0]():
                stream.queue.popleft()
                return True
        return False

    def drain(self) -> None:
        while self.run_some():
            pass
        assert not any(stream.queue for stream in self.streams.values())

    def copy(self, target: int, source: int, size: int, stream: int) -> int:
        self._num_copies += 1
        if self._num_copies == self.fails_at:
            return FAILED
        self.streams[stream].put(lambda: ctypes.memmove(target, source, size))
        return 0


class Event:
    """Both torch's and the driver's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mark: list[bool] = [True]  # of the last record: whether a stream has come to it

    def record(self, stream: Stream) -> None:
        mark = self._mark = [False]

        def reach() -> None:
            mark[0] = True

        stream.put(reach)

    def hold(self, stream: Stream) -> None:
        mark = self._mark
        stream.queue.append(lambda: mark[0])

    def synchronize(self) -> None:
        while not self._mark[0]:
            assert self._device.run_some(), "what is waited for never comes"


class Pages:
    """Page numbers that reach the device in the order of the stream."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._pinned = numpy.full(size, -1, numpy.int32)
        self._there = numpy.full(size, -1, numpy.int32)

    def load(self, stream: int, pages: Sequence[int]) -> list[int]:
        self._pinned[: len(pages)] = pages

        def move() -> None:
            self._there[:] = self._pinned

        self._device.streams[stream].put(move)
        return [self._there.ctypes.data]


class Kernel:
    """The plain form of copy_rows.cu."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def launch(self, ctas: int, stream: int, source: Any, target: Any, size: Any) -> None:
        self._device.streams[stream].put(lambda: self._run(source, target, size))

    def _run(self, source: Any, target: Any, size: Any) -> None:
        for chunk in range(size.chunks):
            row, tile = divmod(chunk, size.tiles)
            row, head = divmod(row, size.heads)
            row, half = divmod(row, size.halves)
            layer, cell = divmod(row, size.cells)
            places = []
            for rows in (source, target):
                page = cell
                if rows.pages:
                    page = ctypes.cast(rows.pages, ctypes.POINTER(ctypes.c_int))[cell]
                    assert 0 <= page < BLOCKS
                place = rows.address + layer * rows.layer + page * rows.page + half * rows.half
                places.append(place + head * rows.head + tile * size.tile)
            count = min(size.tile, size.run - tile * size.tile)
            ctypes.memmove(places[1], places[0], count)


@pytest.fixture(params=range(6))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(request.param)
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(made))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(memory, "Event", lambda: Event(made))
    monkeypatch.setattr(memory, "Context", lambda _: nullcontext())
    monkeypatch.setattr(memory, "PageTable", lambda _, size: Pages(made, size))
    monkeypatch.setattr(memory, "load_copies", lambda _: Kernel(made))
    calls = SimpleNamespace(cuMemcpyHtoDAsync_v2=made.copy, cuMemcpyDtoHAsync_v2=made.copy)
    monkeypatch.setattr(memory, "quick", lambda: calls)
    return made


def random_pool(row: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(row)
    shape = (LAYERS, BLOCKS, row)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def aligned(shape: tuple[int, ...]) -> memory.Bytes:
    size = int(numpy.prod(shape))
    whole = numpy.zeros(size + 16, numpy.uint8)
    first = -whole.ctypes.data % 16
    return whole[first : first + size].reshape(shape)


def some(count: int, last: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(last), count)


@pytest.fixture(params=[16, 48, 64 + 16384])
def row(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize(
    ("portion_slots", "portion_blocks"), [(7, 256), (1, 256), (100, 4), (0, 9)]
)
def test_bytes_go_down_and_come_back(
    device: Device,
    row: int,
    portion_slots: int,
    portion_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "PORTION_BYTES", portion_slots * LAYERS * row)
    monkeypatch.setattr(memory, "_PORTION_BLOCKS", portion_blocks)
    pool, host = random_pool(row), aligned((SLOTS, LAYERS, row))
    before = pool.clone()
    copier = memory._CudaCopier(pool, host)
    blocks = some(40, BLOCKS, 1)
    for slots in (some(40, SLOTS, 2), list(range(5, 45)), list(range(49, 9, -1))):
        host[:] = 0
        copier.store(blocks, slots, host)
        at = torch.from_numpy(host)
        assert torch.equal(at[slots].transpose(0, 1), before[:, blocks])
        others = sorted(set(range(SLOTS)) - set(slots))
        assert not at[others].any()
        pool.zero_()
        targets = some(33, BLOCKS, 3)
        copier.load(targets, slots[:33], host)
        expected = torch.zeros_like(pool)
        expected[:, targets] = before[:, blocks[:33]]
        assert torch.equal(pool, expected)
        device.drain()
        assert torch.equal(pool, expected)
        pool.copy_(before)
    copier.store([], [], host)
    copier.close()


def test_a_copy_that_fails_leaves_nothing_behind_that_writes(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = 32
    monkeypatch.setattr(memory, "PORTION_BYTES", 4 * LAYERS * row)
    pool, host = random_pool(row), aligned((SLOTS, LAYERS, row))
    copier = memory._CudaCopier(pool, host)
    blocks, slots = some(30, BLOCKS, 5), list(range(0, 2 * 20, 2)) + list(range(1, 20, 2))
    for run in (copier.store, copier.load):
        for number in (1, 3, 6):
            device.fails_at = device._num_copies + number
            with pytest.raises(DriverError):
                run(blocks, slots, host)
            left = pool.clone(), host.copy()
            device.drain()
            assert torch.equal(pool, left[0])
            assert (host == left[1]).all()
    copier.store(blocks, slots, host)
    assert torch.equal(torch.from_numpy(host)[slots].transpose(0, 1), pool[:, blocks])


@pytest.mark.usefixtures("device")
def test_what_no_copy_can_move_is_refused() -> None:
    with pytest.raises(OSError, match="24 bytes a layer"):
        memory._CudaCopier(random_pool(24), aligned((SLOTS, LAYERS, 24)))


def test_a_gpu_without_memory_refuses(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(OSError, match="no staging memory"):
        memory._CudaCopier(torch.zeros((1, 2, 16), dtype=torch.uint8), aligned((1, 1, 16)))
