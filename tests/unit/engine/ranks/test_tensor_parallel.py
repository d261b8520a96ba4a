"""What a rank makes of collectives that end late, fail or never end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from engine.errors import RankLost
from engine.ranks import tensor_parallel
from engine.ranks.tensor_parallel import TensorParallel


@pytest.fixture
def pair() -> Iterator[tuple[TensorParallel, TensorParallel]]:
    store = HashStore()
    ranks = TensorParallel(0, 2), TensorParallel(1, 2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: rank.connect(store, "127.0.0.1", 30.0), ranks))
    yield ranks
    for rank in ranks:
        rank.close()


class Late:
    """Work that is done at the very moment at which the first look at it ends for want of time."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._num_looks = 0

    def wait(self, _timeout: timedelta) -> None:
        self._num_looks += 1
        self._work.wait()
        if self._num_looks == 1:
            raise RuntimeError("Operation timed out!")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Failed(Late):
    """Work that is done, and has failed."""

    def wait(self, _timeout: timedelta) -> None:
        self._work.wait()
        raise RuntimeError("Connection closed by peer")


def answered_by(rank: TensorParallel, answer: Callable[[Any], Any]) -> None:
    """Whatever `rank` asks of its group comes back as `answer` of the work."""
    group = rank._group

    class Group:
        def allreduce(self, *args: Any) -> Any:
            return answer(group.allreduce(*args))

    rank._group = Group()


def test_the_sum_is_the_same_on_every_rank(pair: tuple[TensorParallel, TensorParallel]) -> None:
    with ThreadPoolExecutor(2) as pool:
        sums = list(pool.map(lambda r: r.all_reduce(torch.tensor([1.5, r.rank])), pair))
    assert [total.tolist() for total in sums] == [[3.0, 1.0]] * 2


def test_work_that_ends_as_a_look_at_it_ends_has_not_failed(
    pair: tuple[TensorParallel, TensorParallel],
) -> None:
    answered_by(pair[0], Late)
    with ThreadPoolExecutor(2) as pool:
        sums = list(pool.map(lambda r: r.all_reduce(torch.tensor([2.0])), pair))
    assert [total.tolist() for total in sums] == [[4.0], [4.0]]


def test_a_peer_that_comes_after_several_looks_is_waited_for(
    pair: tuple[TensorParallel, TensorParallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "_CHECK_INTERVAL", timedelta(milliseconds=1))
    looks: list[None] = []

    class Counted(Late):
        def wait(self, timeout: timedelta) -> None:
            looks.append(None)
            self._work.wait(timeout)

    answered_by(pair[0], Counted)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(pair[0].all_reduce, torch.tensor([2.0]))
        while len(looks) < 3:
            assert not first.done()
        second = pool.submit(pair[1].all_reduce, torch.tensor([3.0]))
        assert first.result(60).tolist() == second.result(60).tolist() == [5.0]


def test_work_that_failed_is_a_lost_rank(pair: tuple[TensorParallel, TensorParallel]) -> None:
    answered_by(pair[0], Failed)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(pair[1].all_reduce, torch.tensor([2.0]))
        with pytest.raises(RankLost, match="rank 0: a peer is gone"):
            pair[0].all_reduce(torch.tensor([2.0]))
        other.result(60)


def test_nothing_waits_for_a_peer_that_is_known_to_be_gone(
    pair: tuple[TensorParallel, TensorParallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "_CHECK_INTERVAL", timedelta(milliseconds=1))
    asked = threading.Event()

    def noted(work: Any) -> Any:
        asked.set()
        return work

    answered_by(pair[0], noted)
    gone = RankLost("rank 1: it broke", param="rank 1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair[0].all_reduce, torch.tensor([2.0]))
        assert asked.wait(60)
        pair[0].abandon(gone)
        with pytest.raises(RankLost, match="rank 1: it broke"):
            waiting.result(60)
    with pytest.raises(RankLost, match="rank 1: it broke"):
        pair[0].gather(torch.tensor([2.0]))
    pair[1].all_reduce(torch.tensor([2.0]))  # gloo's own thread still waits for it
