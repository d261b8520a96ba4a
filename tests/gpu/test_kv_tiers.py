"""Copies between a GPU's pool and pinned memory: every byte, and their order against steps."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import torch

from kv_tiers.commands import Copy, CopyKind, CopyResult
from kv_tiers.config import TierConfig
from kv_tiers.rank_tiers import RankTiers
from tests.support.device_tiers import DevicePool, converse, recycle


def test_blocks_that_are_stored_evicted_reused_and_loaded_never_mix() -> None:
    assert converse("cuda", range(100, 112), count=120) > 100


def test_one_block_goes_down_and_up_thousands_of_times() -> None:
    recycle("cuda", 3000)


def test_every_byte_of_a_block_goes_down_and_comes_back() -> None:
    data = torch.randint(0, 255, (3, 50, 2, 2, 16, 8), dtype=torch.uint8, device="cuda")
    before = data.clone()
    tiers = RankTiers(DevicePool(data, block_size=16), TierConfig())
    results: deque[CopyResult] = deque()
    ready = threading.Semaphore(0)

    def copy(kind: CopyKind, blocks: tuple[int, ...], slots: tuple[int, ...]) -> None:
        def done(result: CopyResult) -> None:
            results.append(result)
            ready.release()

        tiers.submit(Copy(number=7, kind=kind, blocks=blocks, slots=slots), done)
        ready.acquire()
        assert results.popleft().ok

    copy(CopyKind.OPEN, (), ())
    copy(CopyKind.STORE, (4, 49, 0), (6, 0, 3))
    data.zero_()
    torch.cuda.synchronize()
    copy(CopyKind.LOAD, (11, 12, 13), (3, 6, 0))
    assert torch.equal(data[:, [11, 12, 13]], before[:, [0, 4, 49]])
    assert int(data.sum(dtype=torch.int64)) == int(before[:, [0, 4, 49]].sum(dtype=torch.int64))
    tiers.close()


@pytest.mark.parametrize("num_slots", [1 << 40])
def test_memory_that_is_refused_is_an_answer(num_slots: int) -> None:
    data = torch.zeros((1, 2, 2, 1, 16, 8), dtype=torch.uint8, device="cuda")
    tiers = RankTiers(DevicePool(data, block_size=16), TierConfig())
    results: deque[CopyResult] = deque()
    ready = threading.Semaphore(0)

    def done(result: CopyResult) -> None:
        results.append(result)
        ready.release()

    tiers.submit(Copy(number=num_slots, kind=CopyKind.OPEN, slots=()), done)
    ready.acquire()
    assert not results.popleft().ok
    tiers.close()
