"""Rank 0's end of a group whose followers end or load at the same moment."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from engine.batch import StepBatch
from engine.errors import RankLost
from engine.ranks.follower import Follower
from engine.ranks.group import RankGroup
from engine.ranks.messages import Command, EngineCommand, Report, ReportKind


@pytest.fixture
def group() -> Iterator[RankGroup]:
    group = RankGroup(3, silence_s=160.0)
    yield group
    group.close()


def joined(group: RankGroup) -> dict[int, Follower]:
    """Both followers: they have joined, not loaded."""
    accepting = threading.Thread(target=group.accept, args=(60.0,))
    accepting.start()
    followers = {rank: Follower(group.invite, rank) for rank in (1, 2)}
    accepting.join()
    return followers


def listeners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]


def test_connections_that_prove_nothing_hold_no_rank_up(group: RankGroup) -> None:
    """Silent ones, ones that send a byte at a time, and ones that end."""
    address = group.invite.host, group.invite.port
    with contextlib.ExitStack() as strangers:
        for data in (b"", b"\0", b"\0\0\0\x20\0", b"GET / HTTP/1.1\r\n\r\n"):
            stranger = strangers.enter_context(socket.create_connection(address))
            stranger.sendall(data)
        followers = joined(group)  # in half of what a handshake may take
        assert set(group._channels) == {1, 2}
    for follower in followers.values():
        follower.close()


def test_a_rank_that_loads_after_another_was_lost_breaks_nothing(group: RankGroup) -> None:
    followers = joined(group)
    followers[1].close()
    with pytest.raises(RankLost, match="rank 1"):
        group._loaded[1].result(60)
    with contextlib.suppress(RankLost):
        followers[2]._report(Report(kind=ReportKind.LOADED))
    followers[2].close()
    for thread in listeners():
        thread.join(60)
    with pytest.raises(RankLost, match="rank 1"):
        group.num_blocks(8, 60.0)


class JustLoaded(Future[int]):
    """Finishes loading right after the first check whether it has."""

    def __init__(self) -> None:
        super().__init__()
        self.set_result(8)

    def done(self) -> bool:
        return False


def test_a_rank_that_loads_as_another_is_lost_leaves_none_to_be_waited_for(
    group: RankGroup,
) -> None:
    last: Future[int] = Future()
    group._loaded = {1: JustLoaded(), 2: last}
    group._lose(2, "it died")
    with pytest.raises(RankLost, match="rank 2: it died"):
        last.result(0)
    with pytest.raises(RankLost, match="rank 2: it died"):
        group.num_blocks(8, 60.0)


class Runner:
    """A rank's model: memory for some blocks, and steps that wait for `go`."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.opened = 0
        self.go = threading.Event()

    def choose_num_blocks(self) -> int:
        return self.blocks

    def open(self, num_blocks: int) -> None:
        self.opened = num_blocks
        raise RuntimeError("as far as this goes")

    def follow_step(self, batch: StepBatch) -> None:
        self.go.wait(60)


def test_pools_have_the_size_of_the_rank_with_the_least_memory(group: RankGroup) -> None:
    followers, runners = joined(group), {1: Runner(70), 2: Runner(40)}

    def load(rank: int) -> None:
        with contextlib.suppress(RuntimeError):
            followers[rank].open(runners[rank])

    threads = [threading.Thread(target=load, args=(rank,)) for rank in followers]
    for thread in threads:
        thread.start()
    assert group.num_blocks(50, 60.0) == 40
    assert group.num_blocks(30, 60.0) == 30
    group._send_all(EngineCommand(command=Command.OPEN, number=40))
    for thread in threads:
        thread.join(60)
    assert [runner.opened for runner in runners.values()] == [40, 40]
    for follower in followers.values():
        follower.close()


def test_the_progress_of_a_rank_that_stands_still_is_known(group: RankGroup) -> None:
    followers, runners = joined(group), {1: Runner(1), 2: Runner(1)}
    runners[1].go.set()
    threads = [
        threading.Thread(target=followers[rank].follow, args=(runners[rank], {}))
        for rank in followers
    ]
    for thread in threads:
        thread.start()
    for _ in range(3):
        group.step(StepBatch(sequences=()))
    expected = (
        "rank 0 has sent 3 steps, rank 1 is between steps, 3 ended, rank 2 is in step 1, 0 ended"
    )
    deadline = time.monotonic() + 60
    while group.progress() != expected:
        assert time.monotonic() < deadline, group.progress()
        time.sleep(0.05)
    runners[2].go.set()
    group.close()
    for thread in threads:
        thread.join(60)
