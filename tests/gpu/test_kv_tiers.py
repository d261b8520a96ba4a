"""Copies between a GPU's pool and pinned memory: every byte, and their order against steps."""

from __future__ import annotations

import gc
import random
import threading
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from kv_tiers.commands import Copy, CopyKind, CopyResult
from kv_tiers.config import TierConfig
from kv_tiers.rank_tiers import RankTiers
from tests.support.device_tiers import DevicePool, converse, recycle

_MAX_PITCH = 2**31 - 1  # of CUDA's copies of rows


class OneCopyAtATime:
    """The tiers of a pool, whose copies are waited for."""

    def __init__(self, data: torch.Tensor) -> None:
        self._tiers = RankTiers(DevicePool(data, block_size=16), TierConfig())
        self._results: deque[CopyResult] = deque()
        self._ready = threading.Semaphore(0)

    def copy(
        self, kind: CopyKind, blocks: Sequence[int], slots: Sequence[int], *, number: int = 1
    ) -> bool:
        """Whether it ended well."""

        def done(result: CopyResult) -> None:
            self._results.append(result)
            self._ready.release()

        copy = Copy(number=number, kind=kind, blocks=tuple(blocks), slots=tuple(slots))
        self._tiers.submit(copy, done)
        self._ready.acquire()
        return self._results.popleft().ok

    def open(self, num_slots: int) -> bool:
        return self.copy(CopyKind.OPEN, (), (), number=num_slots)

    def close(self) -> None:
        self._tiers.close()


def test_blocks_that_are_stored_evicted_reused_and_loaded_never_mix() -> None:
    assert converse("cuda", range(100, 112), count=120) > 100


def test_one_block_goes_down_and_up_thousands_of_times() -> None:
    recycle("cuda", 3000)


def test_every_byte_of_a_block_goes_down_and_comes_back() -> None:
    data = torch.randint(0, 255, (3, 50, 2, 2, 16, 8), dtype=torch.uint8, device="cuda")
    before = data.clone()
    tiers = OneCopyAtATime(data)
    assert tiers.open(7)
    assert tiers.copy(CopyKind.STORE, (4, 49, 0), (6, 0, 3))
    data.zero_()
    torch.cuda.synchronize()
    assert tiers.copy(CopyKind.LOAD, (11, 12, 13), (3, 6, 0))
    assert torch.equal(data[:, [11, 12, 13]], before[:, [0, 4, 49]])
    assert int(data.sum(dtype=torch.int64)) == int(before[:, [0, 4, 49]].sum(dtype=torch.int64))
    tiers.close()


@pytest.mark.parametrize(
    ("num_layers", "num_blocks", "num_bytes", "count"),
    [
        (2, 33_000, 65_536, 700),  # layers lie further apart than _MAX_PITCH; three portions
        (32, 800, 65_536, 130),  # nine portions of 16 blocks
        (7, 3_000, 48, 1_100),  # portions of 256 blocks
        (3, 500, 16, 300),
        (1, 300, 65_536 + 16, 200),
        (2, 9, 20 << 20, 4),  # a block is more than a portion
    ],
)
def test_scattered_blocks_and_slots(
    num_layers: int, num_blocks: int, num_bytes: int, count: int
) -> None:
    source = random.Random(count)
    data = torch.zeros((num_layers, num_blocks, num_bytes), dtype=torch.uint8, device="cuda")
    assert (data.stride(0) > _MAX_PITCH) == (num_blocks == 33_000)
    blocks = [num_blocks - 1, *source.sample(range(num_blocks - 1), count - 1)]
    num_slots = count + count // 4
    tiers = OneCopyAtATime(data)
    assert tiers.open(num_slots)
    for slots in (source.sample(range(num_slots), count), list(range(count))):
        shape = (num_layers, count, num_bytes)
        before = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        data[:, blocks] = before
        torch.cuda.synchronize()
        assert tiers.copy(CopyKind.STORE, blocks, slots)
        data.zero_()
        torch.cuda.synchronize()
        targets = [num_blocks - 1, *source.sample(range(num_blocks - 1), count - 1)]
        order = source.sample(range(count), count)
        assert tiers.copy(CopyKind.LOAD, targets, [slots[at] for at in order])
        assert torch.equal(data[:, targets], before[:, order])
        words = data.view(torch.int64).sum(), before.view(torch.int64).sum()
        assert torch.equal(*words), "other blocks were written"
    tiers.close()


@pytest.mark.parametrize("num_slots", [1 << 40])
def test_memory_that_is_refused_is_an_answer(num_slots: int) -> None:
    tiers = OneCopyAtATime(torch.zeros((1, 2, 2, 1, 16, 8), dtype=torch.uint8, device="cuda"))
    assert not tiers.open(num_slots)
    tiers.close()


def test_a_gpu_without_memory_is_an_answer() -> None:
    data = torch.zeros((2, 256, 65_536), dtype=torch.uint8, device="cuda")
    gc.collect()  # staging memory of other tests
    torch.cuda.empty_cache()
    tiers = OneCopyAtATime(data)
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        assert not tiers.open(256)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert tiers.open(256)
    assert tiers.copy(CopyKind.STORE, (1, 2), (200, 3))
    tiers.close()
