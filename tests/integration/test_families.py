"""Every family through prefill, hand-off and decode: the ids are those of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from protocol.sampling import SamplingParams
from tests.support.engine import prompt
from tests.support.families import CASES, save_family
from tests.support.pair import SMALL_STEPS, running_pair
from tests.support.tiny import Oracle

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
EACH_FAMILY = (
    *("llama-yarn", "mistral-window", "qwen2", "qwen3", "phi4-mini", "smollm3"),
    *("granite", "olmo2", "gemma2", "gemma3", "gemma4"),
)
#: Longer than the windows and than what longrope was trained at.
PROMPTS = [prompt(length, seed=5) for length in (70, 97)]


async def check(path: str, **settings: Any) -> None:
    oracle = Oracle(path)
    async with running_pair(
        path, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS, **settings
    ) as pair:
        answers = await asyncio.gather(*(pair.generate(p, GREEDY) for p in PROMPTS))
        for ids, answer in zip(PROMPTS, answers, strict=True):
            assert answer.ids() == oracle.greedy(ids, 12)
        # The prefix is cached on both sides now.
        again = [*PROMPTS[1][:64], 3, 1, 4]
        assert (await pair.generate(again, GREEDY)).ids() == oracle.greedy(again, 12)
        await pair.idle()


@pytest.mark.parametrize("case", CASES)
async def test_ids_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    await check(save_family(case, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(1, 2), (2, 1)], ids=["1 to 2", "2 to 1"])
@pytest.mark.parametrize("case", EACH_FAMILY)
async def test_ids_over_unequal_degrees_and_blocks(
    case: str, degrees: tuple[int, int], tmp_path: Path
) -> None:
    path, sizes = save_family(case, tmp_path), (16 * degrees[0], 16 * degrees[1])
    await check(path, prefill_tp=degrees[0], decode_tp=degrees[1], block_sizes=sizes)
