"""The prefix cache through real workers and hand-offs: the same ids, less computed, less sent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path

import pytest
from msgspec import structs

from engine.config import EngineConfig
from protocol.sampling import SamplingParams
from protocol.timeline import Phase
from tests.support.front_ends import FrontEnds
from tests.support.local_engine import LocalEngine
from tests.support.pair import SMALL_STEPS, Answer, Pair, running_pair
from tests.support.prompts import random_ids
from tests.support.smollm2 import TeacherForced
from tests.support.stack import running_stack
from tests.support.tiny import Oracle
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling import messages

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=42, max_tokens=24, ignore_eos=True)


def sent_bytes(answer: Answer) -> int:
    (span,) = [s for s in answer.spans if s.phase is Phase.TRANSFER]
    return span.counts["bytes"]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 64)], ids=str)
async def test_a_conversation_has_the_ids_it_has_without_a_cache(
    model: str, params: SamplingParams, sizes: tuple[int, int]
) -> None:
    """Each side finds what it has in blocks of its own size, and only the rest is sent."""
    source, dest = sizes
    cell = gcd(source, dest)
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, k/v, heads, head_dim, float32
    local = LocalEngine(EngineConfig(model_path=model, dtype="float32", num_blocks=64))
    prompt: list[int] = []
    prompts, found_here, found_there = [], [], []
    in_prefill = in_decode = 0  # tokens in full blocks there
    async with running_pair(
        model, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS, block_sizes=sizes
    ) as pair:
        for turn in range(3):
            prompt = [*prompt, *random_ids(45, seed=turn)]
            prompts.append(len(prompt))
            found_here.append(min(in_prefill, (len(prompt) - 1) // source * source))
            found_there.append(in_decode)
            answer = await pair.settled(await pair.generate(prompt, params))
            assert answer.ids() == local.generate([(prompt, params)])[0]
            assert answer.cached == found_here[-1]
            sent = -(-len(prompt) // cell) * cell - in_decode
            assert sent_bytes(answer) == token_bytes * sent
            in_prefill = len(prompt) // source * source
            prompt = [*prompt, *answer.ids()]
            in_decode = (len(prompt) - 1) // dest * dest  # the last token never ran
        hits = [worker.status().counters for worker in (*pair.prefills, *pair.decodes)]
        assert [h[messages.PREFIX_CACHE_QUERIES] for h in hits] == [sum(prompts)] * 2
        expected = [sum(found_here), sum(found_there)]
        assert [h[messages.PREFIX_CACHE_HITS] for h in hits] == expected


async def test_decode_prefills_only_what_it_lacks(pair: Pair, oracle: Oracle) -> None:
    first = await pair.generate(random_ids(40), GREEDY)
    turn = [*random_ids(40), *first.ids(), *random_ids(9)]
    second = await pair.generate(turn, GREEDY, local=True)
    assert second.ids() == oracle.greedy(turn, 24)
    assert second.cached == 48  # of 40 + 23 tokens that ran
    again = await pair.generate(turn, GREEDY, local=True)
    assert again.ids() == second.ids()
    assert again.cached == 64
    await pair.idle()


async def test_the_same_prompt_many_times_at_once_is_computed_and_sent_once(
    pair: Pair, oracle: Oracle
) -> None:
    prompt = random_ids(100)
    kinds = [GREEDY, *(structs.replace(SEEDED, seed=i) for i in range(5))]
    answers = await asyncio.gather(*(pair.generate(prompt, params) for params in kinds))
    assert answers[0].ids() == oracle.greedy(prompt, 24)
    assert sorted(answer.cached or 0 for answer in answers) == [0, *[96] * 5]
    await asyncio.gather(*map(pair.settled, answers))
    block = min(sent_bytes(answer) for answer in answers)
    assert sorted(sent_bytes(answer) for answer in answers) == [*[block] * 5, 7 * block]


async def test_eviction_under_pressure_changes_no_id(model: str, oracle: Oracle) -> None:
    async with running_pair(
        model,
        prefill_blocks=16,
        decode_blocks=20,
        prefill_config=SMALL_STEPS,
        decode_config=SMALL_STEPS,
    ) as pair:
        stems = [random_ids(40, seed=i) for i in range(4)]
        rng = random.Random(3)
        prompts = [
            [*rng.choice(stems), *random_ids(rng.randrange(1, 30), seed=i)] for i in range(24)
        ]
        answers = await asyncio.gather(
            *(pair.generate(p, GREEDY, local=i % 3 == 0) for i, p in enumerate(prompts))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids() == oracle.greedy(prompt, 24)
        await pair.idle()
        for worker in (*pair.prefills, *pair.decodes):
            status = worker.status()
            assert status.counters[messages.PREFIX_CACHE_HITS] > 0
            assert status.load.free_blocks == status.load.total_blocks - (
                0 if worker in pair.prefills else int(0.01 * status.load.total_blocks)
            )


async def test_cancelled_in_any_phase_requests_leave_a_sound_cache(
    pair: Pair, oracle: Oracle
) -> None:
    rng = random.Random(7)
    long = structs.replace(GREEDY, max_tokens=200)
    stem = random_ids(60)

    def prompt(i: int) -> list[int]:
        return [*stem[: rng.choice([20, 48, 60])], *random_ids(rng.choice([1, 30]), seed=i % 3)]

    for i in range(30):
        prefill = None if rng.random() < 0.3 else pair.prefill_refs[0]
        key = await pair.router.submit(prompt(i), long, pair.decode_refs[0], prefill)
        await asyncio.sleep(rng.random() * 0.05)
        await pair.router.cancel(key, *pair.decode_refs, *pair.prefill_refs)
    await pair.idle()
    for i in range(6):
        asked = prompt(i)
        assert (await pair.generate(asked, GREEDY, local=i % 2 == 0)).ids() == oracle.greedy(
            asked, 24
        )
    await pair.idle()


async def test_pools_without_a_cache(model: str, oracle: Oracle) -> None:
    off = replace(SMALL_STEPS, enable_prefix_caching=False)
    async with running_pair(model, prefill_config=off, decode_config=SMALL_STEPS) as pair:
        for _ in range(2):
            answer = await pair.settled(await pair.generate(random_ids(50), GREEDY))
            assert answer.ids() == oracle.greedy(random_ids(50), 24)
            assert answer.cached == 0
        assert sent_bytes(answer) > 0
        assert pair.prefills[0].status().load.cached_blocks == 0
        assert pair.decodes[0].status().load.cached_blocks > 0


@pytest.mark.slow
async def test_second_turn_of_a_chat_with_the_real_model(smollm2: Path) -> None:
    """Over both front ends, with n = 2: ids of transformers, usage to the token, one transfer."""
    config = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    rng = random.Random(1)
    prompt = [rng.randrange(1000, 20_000) for _ in range(150)]
    async with running_stack(str(smollm2), prefill_config=config, decode_config=config) as stack:
        front_ends = FrontEnds(stack.http, stack.grpc, "tiny")
        first = await front_ends.over_http(prompt, 20, temperature=0.0)
        turn = [*prompt, *first, *prompt[:30]]
        usages: list[int] = []
        outputs: list[Sequence[int]] = []
        for salt in ("", "cold"):
            salted = {"cache_salt": salt} if salt else {}
            answer = await front_ends.completion(turn, 20, temperature=0.0, n=2, **salted)
            outputs += [choice["token_ids"] for choice in answer["choices"]]
            usages.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            await stack.pair.idle()
        outputs.append(await front_ends.over_grpc(turn, 20, temperature=0.0))
        await front_ends.close()
        moved = stack.pair.decodes[0].status().counters
    assert usages == [144, 0]
    assert all(output == outputs[0] for output in outputs)
    assert TeacherForced(smollm2).first_difference(turn, outputs[0]) is None
    # 10 blocks; 13 less the 10 that decode has of 150 + 19 tokens, and 1 for the other choice;
    # 13 and 1 without a cache; 1 for the request over gRPC: each is 30 layers of k and v.
    assert moved["handoff_bytes_total"] == (10 + 3 + 1 + 13 + 1 + 1) * BLOCK * 30 * 2 * 3 * 64 * 4
