"""Different tensor-parallel degrees on the two sides, in float32: the ids of transformers, and a
lost rank."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.cluster.conftest import CHUNK, CHUNKED, Baton, session_processes
from tests.cluster.load import ask, ask_all, wait_until
from tests.support.prompts import prompts
from tests.support.smollm2 import TeacherForced

ASKED = prompts(9, chunk=CHUNK, longest=3 * CHUNK + 7)


@pytest.fixture(scope="module")
def one_to_three(shared_baton: Baton) -> Baton:
    """Prefill of one rank, decode of three."""
    shared_baton.up("local-cpu-tp.yaml", *CHUNKED, "prefill.engine.kv_memory_bytes=1GiB")
    return shared_baton


@pytest.mark.timeout(600)
async def test_ids_from_one_rank_to_three(one_to_three: Baton, oracle: TeacherForced) -> None:
    outputs = await ask_all(one_to_three, ASKED, 24)
    assert oracle.differences(ASKED, outputs) == {}


def test_a_lost_rank(one_to_three: Baton) -> None:
    """A killed rank gets its replica replaced, and `down` leaves no process."""
    baton = one_to_three
    session = int(baton.state()["pid"])

    def followers() -> list[str]:
        return [row for row in session_processes(session) if "FollowerRank" in row]

    prompt = "The capital of France is the city of Paris, and the capital of Spain is"
    before = ask(baton, prompt)
    assert before.completion_tokens == 8
    assert len(followers()) == 2
    (old,) = baton.pool("decode")
    os.kill(int(followers()[0].split()[1]), signal.SIGKILL)
    wait_until(lambda: bool(baton.pool("decode") - {old}), seconds=90)
    assert ask(baton, prompt).token_ids == before.token_ids
    assert len(followers()) == 2
    baton.run("down")
    assert session_processes(session) == []
    assert not (baton.home / "run" / "cluster.json").exists()


@pytest.mark.timeout(600)
async def test_ids_from_three_ranks_to_one(baton: Baton, oracle: TeacherForced) -> None:
    degrees = ("prefill.engine.tp_size=3", "decode.engine.tp_size=1")
    settings = (*CHUNKED, *degrees, "prefill.engine.kv_memory_bytes=1GiB")
    await asyncio.to_thread(baton.up, "local-cpu-tp.yaml", *settings)
    outputs = await ask_all(baton, ASKED, 24)
    assert oracle.differences(ASKED, outputs) == {}
