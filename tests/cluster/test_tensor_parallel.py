"""Different tensor-parallel degrees on the two sides, in float32: the ids of transformers, and a
lost rank."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.conftest import CHUNK, CHUNKED, PATIENT, Baton, session_processes
from tests.cluster.load import LONG, ask, ask_all, wait_until
from tests.support.prompts import prompts
from tests.support.smollm2 import TeacherForced

ASKED = prompts(9, chunk=CHUNK, longest=3 * CHUNK + 7)


@pytest.fixture(scope="module")
def one_to_three(shared_baton: Baton, short_model: Path) -> Baton:
    """Prefill of one rank, decode of three."""
    baton = replace(shared_baton, model=short_model)
    baton.up("local-cpu-tp.yaml", *CHUNKED, *PATIENT)
    return baton


async def test_ids_from_one_rank_to_three(one_to_three: Baton, short_oracle: TeacherForced) -> None:
    outputs = await ask_all(one_to_three, ASKED, 24)
    assert short_oracle.differences(ASKED, outputs) == {}


async def test_ids_from_three_ranks_to_one(
    one_to_three: Baton, short_oracle: TeacherForced
) -> None:
    """The workers change roles. None has seen these prompts."""
    (one,), (three,) = one_to_three.pool("prefill"), one_to_three.pool("decode")
    await asyncio.to_thread(swap, one_to_three, to_decode=one, to_prefill=three)
    outcome = await asyncio.to_thread(ask, one_to_three, LONG)
    assert outcome.timeline is not None
    spans = {span.phase: span for span in outcome.timeline.spans}
    assert (spans["prefill"].place, spans["decode"].place) == (three, one)
    assert spans["transfer"].counts["bytes"] > 0
    asked = [[token % 40_000 + 5000 for token in prompt] for prompt in ASKED]
    outputs = await ask_all(one_to_three, asked, 24)
    assert short_oracle.differences(asked, outputs) == {}
    await asyncio.to_thread(swap, one_to_three, to_decode=three, to_prefill=one)


def swap(baton: Baton, *, to_decode: str, to_prefill: str) -> None:
    """Change the roles of two workers; one of them decodes all the time."""
    baton.run("role", to_decode, "decode")
    wait_until(lambda: baton.roles()[to_decode] == "decode")
    baton.run("role", to_prefill, "prefill")
    wait_until(lambda: baton.roles() == {to_decode: "decode", to_prefill: "prefill"})


def test_a_lost_rank(one_to_three: Baton) -> None:
    """A killed rank gets its replica replaced, and `down` leaves no process."""
    baton = one_to_three
    session = int(baton.state()["pid"])

    def followers() -> list[str]:
        return [row for row in session_processes(session) if "FollowerRank" in row]

    prompt = "The capital of France is the city of Paris, and the capital of Spain is"
    before = ask(baton, prompt)
    assert len(before.token_ids[0]) == 8
    assert len(followers()) == 2
    (old,) = baton.pool("decode")
    os.kill(int(followers()[0].split()[1]), signal.SIGKILL)
    wait_until(lambda: bool(baton.pool("decode") - {old}))
    assert ask(baton, prompt).token_ids == before.token_ids
    wait_until(lambda: len(followers()) == 2)
    baton.run("down")
    assert session_processes(session) == []
    assert not (baton.home / "run" / "cluster.json").exists()
