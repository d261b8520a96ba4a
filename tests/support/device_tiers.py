"""The world of tests.support.tiers_world with tensors for blocks and the real copies of a rank."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import SequenceStep, StepBatch, StepResult
from kv_tiers.commands import Copy, CopyKind, CopyResult
from kv_tiers.config import TierConfig
from kv_tiers.rank_tiers import RankTiers
from tests.support.paged import PagedTokens, next_token
from tests.support.tiers_world import BLOCK, NUM_BLOCKS, World

LAYERS, WIDTH = 4, 512  # a token of a layer is 2 KiB, all of it the token's id


@dataclass
class DevicePool:
    """What copies need to know of a pool."""

    data: Tensor
    block_size: int = BLOCK

    @property
    def device(self) -> torch.device:
        return self.data.device


class DeviceTokens(PagedTokens):
    """PagedTokens whose blocks are in a pool like an engine's. On a GPU steps run on a stream of
    their own, behind a matrix product that keeps it busy."""

    def __init__(self, device: str) -> None:
        super().__init__(NUM_BLOCKS, BLOCK)
        self._device = torch.device(device)
        on_gpu = self._device.type == "cuda"
        shape = (LAYERS, NUM_BLOCKS, BLOCK, WIDTH)
        self.pool = DevicePool(torch.full(shape, -1, dtype=torch.int32, device=device))
        self._matrix = torch.randn((2048, 2048) if on_gpu else (8, 8), device=device)
        self._stream = torch.cuda.Stream() if on_gpu else None
        if on_gpu:
            torch.cuda.synchronize()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def run(self, batch: StepBatch) -> StepResult:
        with self._on_stream():
            torch.mm(self._matrix, self._matrix)
            for step in batch.sequences:
                places = [self._slot(step, 0, step.start + i) for i in range(len(step.tokens))]
                blocks, offsets = (
                    torch.tensor(x, device=self._device) for x in zip(*places, strict=True)
                )
                tokens = torch.tensor(step.tokens, dtype=torch.int32, device=self._device)
                self.pool.data[:, blocks, offsets] = tokens[None, :, None]
        return super().run(batch)

    def _sample(self, step: SequenceStep) -> int | None:
        count = step.start + len(step.tokens)
        with self._on_stream():
            table = torch.tensor(step.block_tables[0], device=self._device)
            seen = self.pool.data[:, table].view(LAYERS, -1, WIDTH)[:, :count]
            least, most = torch.aminmax(seen.transpose(0, 1).reshape(count, -1), dim=1)
            both = torch.stack((least, most)).tolist()
        assert both[0] == both[1], "a token's KV is mixed"
        return None if step.sampling is None else next_token(both[0], step.sampling.seed)


class DeviceCopies:
    """A rank's own threads."""

    def __init__(self, world: World, pool: DevicePool, num_slots: int) -> None:
        self._tiers = RankTiers(pool, TierConfig())
        self._results: deque[tuple[int, CopyResult]] = deque()
        self._world = world
        self._num_running = 0
        self._ready = threading.Semaphore(0)
        self.num_loads = 0
        self.start(Copy(number=num_slots, kind=CopyKind.OPEN, slots=()))
        self._take()

    def start(self, copy: Copy) -> None:
        self._num_running += 1
        self.num_loads += copy.kind is CopyKind.LOAD

        def done(result: CopyResult) -> None:
            self._results.append((copy.number, result))
            self._ready.release()

        self._tiers.submit(copy, done)

    @property
    def busy(self) -> bool:
        return self._num_running > 0

    def step(self) -> None:
        """Take the next result, once there is one."""
        self._world.copied(*self._take())

    def _take(self) -> tuple[int, CopyResult]:
        self._ready.acquire()
        self._num_running -= 1
        number, result = self._results.popleft()
        assert result.ok
        return number, result

    def close(self) -> None:
        self._tiers.close()


def converse(device: str, seeds: range, count: int) -> int:
    """Run conversations through a scheduler and the real copies; the number of loads. Every token
    of every context is read back whole, from all layers."""
    num_loads = 0
    for seed in seeds:
        engine = DeviceTokens(device)
        made: list[DeviceCopies] = []

        def copies(
            world: World,
            num_slots: int,
            engine: DeviceTokens = engine,
            made: list[DeviceCopies] = made,
        ) -> DeviceCopies:
            made.append(DeviceCopies(world, engine.pool, num_slots))
            return made[-1]

        world = World(seed, engine=engine, copies=copies)
        world.run(count)
        world.check_outputs()
        num_loads += made[0].num_loads
        made[0].close()
    return num_loads


def recycle(device: str, rounds: int) -> None:
    """Store one block, evict it, reuse its place, and load it back into another, so many times,
    while other blocks go up and down without pause. Asserts that no byte is mixed."""
    pool = DevicePool(torch.zeros((LAYERS, 40, BLOCK, 16), dtype=torch.int32, device=device))
    tiers = RankTiers(pool, TierConfig())
    stop = threading.Event()

    def copy(kind: CopyKind, blocks: tuple[int, ...], slots: tuple[int, ...]) -> None:
        done = threading.Event()
        results: list[CopyResult] = []

        def finish(result: CopyResult) -> None:
            results.append(result)
            done.set()

        tiers.submit(Copy(number=40, kind=kind, blocks=blocks, slots=slots), finish)
        assert done.wait(60)
        assert results[0].ok

    def others() -> None:
        blocks, slots = tuple(range(4, 40)), tuple(range(4, 40))
        while not stop.is_set():
            copy(CopyKind.STORE, blocks, slots)
            copy(CopyKind.LOAD, blocks, slots)

    copy(CopyKind.OPEN, (), ())
    thread = threading.Thread(target=others)
    thread.start()
    try:
        for number in range(1, rounds + 1):
            block, other, slot = number % 3, (number + 1) % 3, number % 4
            pool.data[:, block] = number
            _finish(device)
            copy(CopyKind.STORE, (block,), (slot,))
            pool.data[:, block] = -number
            _finish(device)
            copy(CopyKind.LOAD, (other,), (slot,))
            both = torch.stack(torch.aminmax(pool.data[:, other])).tolist()
            assert both == [number, number], f"round {number}: {both}"
    finally:
        stop.set()
        thread.join()
        tiers.close()


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
