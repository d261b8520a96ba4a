"""Tensor-parallel engines as processes: equal ids, calls in order, the loss of a rank."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.errors import ModelRefused, RankLost
from engine.executor import Executor, build_executor
from engine.ranks.follower import Follower
from engine.ranks.group import RankGroup
from engine.ranks.messages import RankInvite, Report, ReportKind
from protocol import codec
from protocol.errors import BatonError, Internal, NotFound
from protocol.sampling import SamplingParams
from tests.support.engine import GREEDY, chunk, config, prompt
from tests.support.local_engine import LocalEngine
from tests.support.processes import forks
from tests.support.rank_process import follow, lead
from tests.support.tiny import Oracle, save_tiny_llama


@dataclass
class Running:
    """An engine whose followers are processes."""

    group: RankGroup
    executor: Executor
    processes: list[BaseProcess]


@contextmanager
def start(settings: EngineConfig, **group_settings: Any) -> Iterator[Running]:
    """Start followers and rank 0; afterwards every process must have ended."""
    group = RankGroup(settings.tp_size, **{"silence_s": 1000.0, **group_settings})
    processes: list[BaseProcess] = [
        forks().Process(target=follow, args=(group.invite, rank, settings), daemon=True)
        for rank in range(1, settings.tp_size)
    ]
    for process in processes:
        process.start()
    try:
        yield Running(group, build_executor(settings, group, timeout_s=120), processes)
    finally:
        group.close()
        for process in processes:
            process.join(60)
        stuck = [process for process in processes if process.is_alive()]
        for process in stuck:
            process.kill()
        assert not stuck, "followers end with their group"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two KV heads, so that four ranks replicate them; a vocabulary that nothing divides."""
    return save_tiny_llama(tmp_path_factory.mktemp("ranks"), vocab_size=131, attention_bias=True)


@pytest.mark.parametrize("size", [2, 4])
def test_every_degree_gives_transformers_ids_and_seeded_ones_too(model: str, size: int) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=8, ignore_eos=True)
    requests = [(prompt(length), p) for length in (1, 8, 40) for p in (GREEDY, seeded)]
    whole = LocalEngine(config(model)).generate(requests)
    oracle = Oracle(model)
    with start(config(model, tp_size=size)) as running:
        running.executor.warmup()
        engine = LocalEngine(config(model, tp_size=size, max_step_tokens=17), running.executor)
        found = engine.generate(requests)
    assert found == whole
    assert found[::2] == [oracle.greedy(ids, 8) for ids, _ in requests[::2]]
    assert [p.exitcode for p in running.processes] == [0] * (size - 1)


def test_calls_are_answered_in_order_with_steps(model: str) -> None:
    with start(config(model, tp_size=2)) as running:
        group, executor = running.group, running.executor
        before = group.call(1, "blocks", b"")
        executor.warmup()
        after = group.call(1, "blocks", b"")
        assert before.result(60) == b""
        assert after.result(60) == b"0"
        assert group.call(1, "echo", b"x" * 100_000).result(60) == b"1:" + b"x" * 100_000


def test_an_answer_may_come_later_without_holding_up_steps(model: str) -> None:
    with start(config(model, tp_size=2)) as running:
        waiting = running.group.call(1, "later", b"")
        running.executor.warmup()
        assert not waiting.done()
        assert running.group.call(1, "later", b"now").result(60) == b"1"
        assert waiting.result(60) == b"0"


def test_errors_of_a_call_are_its_answer_and_the_engine_goes_on(model: str) -> None:
    with start(config(model, tp_size=2)) as running:
        with pytest.raises(NotFound) as caught:
            running.group.call(1, "refuse", b"").result(60)
        assert caught.value.param == "thing"
        for kind, text in (("crash", "ZeroDivisionError"), ("unknown", "KeyError")):
            with pytest.raises(Internal, match=text):
                running.group.call(1, kind, b"").result(60)
        running.executor.warmup()


def test_an_unsound_step_is_refused_before_a_follower_sees_it(model: str) -> None:
    with start(config(model, tp_size=2)) as running:
        with pytest.raises(Internal):
            running.executor.run(StepBatch(sequences=(chunk([9999], 0, [0]),)))
        running.executor.warmup()


@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_silent_follower_surfaces_in_seconds(model: str, how: int) -> None:
    """A dead one at once, however long one may be silent."""
    with start(config(model, tp_size=2)) as running:
        engine = LocalEngine(config(model, tp_size=2), running.executor)
        waiting = running.group.call(1, "later", b"")
        pid = running.processes[0].pid
        assert pid is not None
        if how is signal.SIGSTOP:
            be_impatient(running.group)
        os.kill(pid, how)
        forever = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        with pytest.raises(RankLost):
            while True:
                engine.generate([([1], forever)])
        with pytest.raises(RankLost):
            waiting.result(60)
        with pytest.raises(RankLost):
            running.group.call(1, "echo", b"").result(60)
        with pytest.raises(RankLost):
            running.executor.warmup()
        running.processes[0].kill()


def be_impatient(group: RankGroup) -> None:
    """From the next heartbeat on, rank 1 may be silent for two seconds."""
    group._silence_s, last = 2.0, group._reports.get(1)
    while group._reports.get(1) is last:
        time.sleep(0.01)


@pytest.mark.chaos
def test_followers_end_when_rank_0_dies(model: str) -> None:
    context = forks()
    receiver, sender = context.Pipe(duplex=False)
    ready = context.Event()
    settings = config(model, tp_size=2)
    leader = context.Process(target=lead, args=(settings, sender, ready), daemon=True)
    leader.start()
    invite = codec.decode(RankInvite, receiver.recv_bytes())
    follower = context.Process(target=follow, args=(invite, 1, settings), daemon=True)
    follower.start()
    assert ready.wait(120)
    leader.kill()
    follower.join(60)
    assert follower.exitcode == 1
    leader.join(60)


def test_a_follower_that_cannot_load_fails_the_start_with_its_reason(
    model: str, tmp_path: Path
) -> None:
    group = RankGroup(2)
    broken = config(str(tmp_path), tp_size=2)
    process = forks().Process(target=follow, args=(group.invite, 1, broken), daemon=True)
    process.start()
    with pytest.raises(RankLost, match=r"config\.json"):
        build_executor(config(model, tp_size=2), group, timeout_s=60)
    group.close()
    process.join(60)
    assert process.exitcode == 1


def test_ranks_that_do_not_come_are_named(model: str) -> None:
    group = RankGroup(3)
    with pytest.raises(RankLost, match=r"\[1, 2\]"):
        build_executor(config(model, tp_size=3), group, timeout_s=0.2)
    group.close()


def test_strangers_do_not_join(model: str) -> None:
    group = RankGroup(2, silence_s=0.3)
    address = (group.invite.host, group.invite.port)
    silent = socket.create_connection(address)
    loud = socket.create_connection(address)
    loud.sendall(b"\x05\x00\x00\x00hello")
    with pytest.raises(RankLost, match=r"\[1\]"):
        group.accept(1.0)
    silent.close()
    loud.close()
    group.close()


def test_sizes_must_agree(model: str) -> None:
    with pytest.raises(BatonError) as caught:
        build_executor(config(model, tp_size=2))
    assert caught.value.param == "tp_size"
    with pytest.raises(ModelRefused, match="allowed: 1, 2, 4"):
        group = RankGroup(3)
        try:
            group._channels = dict.fromkeys((1, 2))  # type: ignore[arg-type]
            build_executor(config(model, tp_size=3), group)
        finally:
            group._channels = {}
            group.close()


def test_a_rank_that_hangs_while_it_loads_ends_the_start(model: str) -> None:
    group = RankGroup(2)
    invite = group.invite
    hanging = threading.Event()

    def follow_until_told() -> None:
        follower = Follower(invite, 1)
        hanging.wait(60)  # alive, and never loaded
        follower.close()

    thread = threading.Thread(target=follow_until_told, daemon=True)
    thread.start()
    group.accept(60)
    with pytest.raises(RankLost, match=r"rank 1: did not load in 0\.5 s"):
        build_executor(config(model, tp_size=2), group, timeout_s=0.5)
    group.close()
    hanging.set()
    thread.join(60)
    assert not thread.is_alive()


def test_an_answer_to_a_caller_that_has_left_breaks_nothing() -> None:
    group = RankGroup(2)
    answer: Future[bytes] = Future()
    handlers = {"later": lambda _: answer, "echo": lambda payload: payload}
    obeying = threading.Thread(
        target=lambda: Follower(group.invite, 1).follow(Mock(), handlers), daemon=True
    )
    obeying.start()
    group.accept(60)

    async def call_and_leave() -> None:
        waiting = asyncio.wrap_future(group.call(1, "later", b""))
        waiting.cancel()
        await asyncio.sleep(0)

    asyncio.run(call_and_leave())
    answer.set_result(b"late")
    assert group.call(1, "echo", b"next").result(60) == b"next"
    group.close()
    obeying.join(60)
    assert not obeying.is_alive()


def test_a_call_after_the_end_fails_at_once() -> None:
    group = RankGroup(2)
    joined = threading.Thread(target=lambda: Follower(group.invite, 1), daemon=True)
    joined.start()
    group.accept(60)
    group.close()
    with pytest.raises(RankLost, match="closed"):
        group.call(1, "echo", b"").result(60)
    group._take(1, Report(kind=ReportKind.ANSWER, number=0))  # late: its call has failed
    joined.join(60)
