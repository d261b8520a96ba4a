"""Families through prefill, hand-off and decode, where something goes differently."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.kv.sizing import kv_layout
from engine.model.families import load_model_config
from protocol.sampling import SamplingParams
from protocol.timeline import Phase
from tests.support.engine import prompt
from tests.support.families import save_family
from tests.support.pair import SMALL_STEPS, Answer, Brake, running_pair
from tests.support.tiny import Oracle
from worker_runtime.scheduling.messages import PREEMPTIONS

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPT = prompt(97, seed=5)


WINDOWED = ["gemma3", "mistral-window"]
FAMILIES = [*WINDOWED, "gemma4", "gemma2", "qwen2", "qwen3", "phi3", "olmo2", "granite", "smollm3"]


@pytest.fixture(params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return save_family(request.param, tmp_path)


def sent_bytes(answer: Answer) -> int:
    (span,) = (span for span in answer.spans if span.phase is Phase.TRANSFER)
    return span.counts["bytes"]


@pytest.mark.parametrize("path", WINDOWED, indirect=True)
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
async def test_blocks_of_different_sizes(path: str, sizes: tuple[int, int]) -> None:
    oracle = Oracle(path)
    async with running_pair(
        path, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS, block_sizes=sizes
    ) as pair:
        answer = await pair.generate(PROMPT, GREEDY)
        assert answer.ids() == oracle.greedy(PROMPT, 40)
        await pair.settled(answer)
        layout = pair.decodes[0].status().layout
        layers = sum(group.num_layers or layout.num_layers for group in layout.groups)
        everything = 112 * layers * layout.token_bytes() // layout.num_layers
        # At most a window of 11 tokens, in cells of 16, of all layers but one.
        assert sent_bytes(answer) <= everything * (1 / layers + 32 / 112)
        assert any(group.window for group in layout.groups)
        again = [*PROMPT[:64], 3, 1, 4]
        assert (await pair.generate(again, GREEDY)).ids() == oracle.greedy(again, 40)
        await pair.idle()


async def test_a_request_goes_on_after_the_loss_of_its_decode_worker(path: str) -> None:
    oracle = Oracle(path)
    async with running_pair(
        path, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS, num_decode=2
    ) as pair:
        router, layout = pair.router, pair.decodes[0].status().layout
        Brake(pair.decodes[0], 30)
        key = await router.submit(
            PROMPT, GREEDY, pair.decode_refs[0], pair.prefill_refs[0], layout=layout
        )
        while not set(range(5)) <= router.answers[key].tokens.keys():
            await asyncio.sleep(0.005)
        await pair.decodes[0].stop()
        known = router.answers[key].ids()
        for prefill in (pair.prefill_refs[0], None):
            again = await router.submit(
                *(PROMPT, GREEDY, pair.decode_refs[1], prefill),
                layout=layout,
                output=known,
                attempt=1,
            )
            answer = await router.answer(again)
            assert [*known, *answer.ids()] == oracle.greedy(PROMPT, 40)
        del pair.decodes[0], pair.decode_refs[0]
        await pair.idle()


async def test_preempted_requests_say_what_they_would_have_said(path: str) -> None:
    oracle = Oracle(path)
    config = EngineConfig(model_path=path, dtype="float32", block_size=16, num_blocks=1)
    layout = kv_layout(config, load_model_config(path), 1)
    prompts = [prompt(length, seed=11) for length in (60, 61, 62, 63)]
    async with running_pair(
        path,
        decode_config=replace(SMALL_STEPS, watermark=0.0),
        decode_blocks=layout.pages_for(63 + 1, 32) + 2 * layout.pages_for(63 + 1) + 1,
    ) as pair:
        answers = await pair.at_once((pair.generate(p, GREEDY) for p in prompts), running=2)
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer.ids() == oracle.greedy(ids, 40)
        if layout.groups[0].window is None:
            assert pair.decodes[0].status().counters[PREEMPTIONS] > 0
        await pair.idle()
