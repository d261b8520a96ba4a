"""KV that one real worker takes from another: the same ids, nothing computed twice, and a lender
that has lost it, fails or says nothing costs no request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.config import EngineConfig
from protocol.loans import LoanOffer, LoanRequest
from protocol.sampling import SamplingParams
from protocol.timeline import Phase
from rpc import methods
from tests.support.local_engine import LocalEngine
from tests.support.pair import SMALL_STEPS, running_pair
from tests.support.prompts import random_ids
from worker_runtime.scheduling import peer_blocks
from worker_runtime.worker import Worker

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = random_ids(100)
BORROWED = "kv_tier_hit_tokens_total{tier=peer}"


@pytest.fixture
def wanted(model: str) -> list[int]:
    local = LocalEngine(EngineConfig(model_path=model, dtype="float32", num_blocks=64))
    return local.generate([(PROMPT, GREEDY)])[0]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loan is late, however busy the machine is."""
    monkeypatch.setattr(peer_blocks, "patience_s", lambda _load_s: 60.0)


def counter(worker: Worker, key: str) -> int:
    return worker.status().counters.get(key, 0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("tp", "block_sizes"), [((1, 1), (16, 16)), ((2, 1), (16, 16)), ((1, 2), (8, 16))]
)
async def test_prefill_takes_what_only_decode_has(
    model: str, wanted: list[int], tp: tuple[int, int], block_sizes: tuple[int, int]
) -> None:
    async with running_pair(
        model, prefill_tp=tp[0], decode_tp=tp[1], block_sizes=block_sizes, num_decode=2
    ) as pair:
        assert (await pair.generate(PROMPT, GREEDY, local=True)).ids() == wanted
        (prefill,), (holder, other) = pair.prefills, pair.decode_refs
        key = await pair.router.submit(
            PROMPT,
            GREEDY,
            other,
            pair.prefill_refs[0],
            layout=pair.decodes[1].status().layout,
            source=(holder, 104),
        )
        answer = await pair.router.answer(key)
        assert answer.ids() == wanted
        assert answer.cached == 96
        await pair.settled(answer)
        assert counter(prefill, BORROWED) == 96
        (span,) = [s for s in answer.spans if s.phase is Phase.KV_LOAD]
        assert span.counts == {"peer_tokens": 96}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("cached", [96, 64])
async def test_decode_takes_what_only_prefill_has(
    model: str, wanted: list[int], cached: int
) -> None:
    """All of what it asks for, or what is left of it."""
    async with running_pair(model, num_decode=2) as pair:
        await pair.generate(PROMPT[: cached + 4], GREEDY)
        key = await pair.router.submit(
            PROMPT, GREEDY, pair.decode_refs[1], None, source=(pair.prefill_refs[0], 96)
        )
        answer = await pair.router.answer(key)
        assert answer.ids() == wanted
        assert (answer.cached, counter(pair.decodes[1], BORROWED)) == (cached, cached)
        await pair.idle()


@pytest.mark.usefixtures("patient")
async def test_a_lender_lends_what_only_its_host_memory_has(model: str, wanted: list[int]) -> None:
    options: Any = {"num_decode": 2, "decode_blocks": 10, "decode_config": SMALL_STEPS}
    async with running_pair(model, **options) as pair:
        assert (await pair.generate(PROMPT, GREEDY, local=True)).ids() == wanted
        await pair.stored()
        await pair.generate(random_ids(120, seed=3), GREEDY, local=True)  # evicts it
        holder, other = pair.decode_refs
        (prefill,) = pair.prefill_refs
        key = await pair.router.submit(PROMPT, GREEDY, other, prefill, source=(holder, 96))
        assert (await pair.router.answer(key)).ids() == wanted
        assert counter(pair.prefills[0], BORROWED) == 96
        await pair.idle()


async def refuses(_request: LoanRequest) -> LoanOffer:
    raise ValueError("broken")


async def says_nothing(_request: LoanRequest) -> LoanOffer:
    await asyncio.sleep(20)
    return LoanOffer(num_tokens=0)


@pytest.mark.parametrize("fault", [None, refuses, says_nothing], ids=["gone", "fails", "silent"])
async def test_a_lender_that_has_nothing_or_fails_costs_no_request(
    model: str, wanted: list[int], fault: Any
) -> None:
    async with running_pair(model) as pair:
        if fault is not None:
            pair.decodes[0]._server.add({methods.LEND: fault})
        answer = await pair.generate(PROMPT, GREEDY, source=(pair.decode_refs[0], 96))
        assert answer.ids() == wanted
        assert answer.cached == 0
        await pair.stored()


@pytest.mark.parametrize("dies", [False, True], ids=["freezes", "dies"])
async def test_a_lender_that_is_lost_in_mid_load_costs_no_request(
    model: str,
    wanted: list[int],
    dies: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has leased what it has and knows where to send it, and nothing comes."""
    if dies:
        request.getfixturevalue("patient")
    async with running_pair(model, num_decode=2) as pair:
        assert (await pair.generate(PROMPT, GREEDY, local=True)).ids() == wanted
        (prefill,), (holder, other) = pair.prefills, pair.decode_refs
        sends, sender = asyncio.Event(), pair.decodes[0].transfers.handoffs.sender

        async def lost(_piece: object) -> None:
            sends.set()
            if dies:  # either way, as after a cut between their machines
                prefill.peers_left(frozenset({holder.epoch}))
                pair.decodes[0].peers_left(frozenset({pair.prefill_refs[0].epoch}))
            await asyncio.sleep(20)

        monkeypatch.setattr(sender, "_deliver", lost)
        key = await pair.router.submit(
            PROMPT, GREEDY, other, pair.prefill_refs[0], source=(holder, 96)
        )
        answer = await pair.router.answer(key)
        assert sends.is_set() or not dies  # else the loan may be late before
        assert answer.ids() == wanted
        assert (answer.cached, counter(prefill, BORROWED)) == (0, 0)
        await pair.stored()
