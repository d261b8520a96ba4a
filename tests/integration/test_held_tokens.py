"""First tokens that decode sends, with its step for the second one: the same tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from msgspec import structs

from protocol.sampling import SamplingParams
from tests.support.pair import SMALL_STEPS, running_pair
from tests.support.prompts import random_ids
from tests.support.tiny import Oracle
from worker_runtime.scheduling.messages import HELD

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
NOISY = SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True)
CHUNK = SMALL_STEPS.max_num_batched_tokens


async def test_first_tokens_that_decode_sends_are_the_same(model: str, oracle: Oracle) -> None:
    holds = replace(SMALL_STEPS, hold_first_s=3600.0)
    prompts = [random_ids(length, seed=length) for length in (1, 16, CHUNK + 1, 3 * CHUNK + 7)]
    async with running_pair(model, prefill_config=holds, decode_config=SMALL_STEPS) as pair:
        answers = await asyncio.gather(*(pair.generate(prompt, GREEDY) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids() == oracle.greedy(prompt, 6)
            assert sorted(answer.tokens) == list(range(6))
        sampled = [await pair.generate(prompts[2], NOISY, local=local) for local in (False, True)]
        assert sampled[0].ids() == sampled[1].ids()
        assert pair.prefills[0].status().counters[HELD] == len(prompts) + 1
        likely = await pair.generate(prompts[0], structs.replace(GREEDY, logprobs=0))
        assert likely.ids() == oracle.greedy(prompts[0], 6)
        assert None not in likely.logprobs.values()
        assert pair.prefills[0].status().counters[HELD] == len(prompts) + 1
        await pair.idle()
