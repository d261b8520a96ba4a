"""Log-probabilities through both workers and their hand-off, against transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from protocol.sampling import SamplingParams, TokenLogprobs
from protocol.states import FinishReason
from tests.support.pair import SMALL_STEPS, Answer, Pair, running_pair
from tests.support.prompts import random_ids
from worker_runtime.scheduling import messages

#: Of a log-probability, between transformers and the workers, both in float32.
TOLERANCE = 1e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
PENALISED = replace(
    GREEDY,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    logit_bias=((7, -100.0), (9, 4.0)),
)


@pytest.fixture(scope="module")
def hf(model: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def check(hf: torch.nn.Module, prompt: list[int], answer: Answer, num_top: int) -> None:
    """Every reported log-probability is that of one pass of transformers over all tokens."""
    output = answer.ids() if answer.tokens else []
    with torch.inference_mode():
        rows = hf(torch.tensor([[*prompt, *output]])).logits[0].log_softmax(dim=-1)
    for index, token in enumerate(output):
        entry = answer.logprobs[index]
        assert entry is not None
        check_entry(entry, rows[len(prompt) - 1 + index], token, num_top)
    for position, entry in answer.scores.items():
        check_entry(entry, rows[position - 1], prompt[position], num_top)


def check_entry(entry: TokenLogprobs, row: torch.Tensor, token: int, num_top: int) -> None:
    assert entry.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
    want = row.topk(num_top).values.tolist()
    assert list(entry.top_logprobs) == pytest.approx(want, abs=TOLERANCE)
    assert [float(row[i]) for i in entry.top_ids] == pytest.approx(want, abs=TOLERANCE)


@pytest.mark.parametrize("local", [False, True], ids=["handed over", "prefilled on decode"])
async def test_output_and_prompt_equal_transformers(
    pair: Pair, hf: torch.nn.Module, local: bool
) -> None:
    for length in (1, 2, 16, 31, 32, 33, 103):
        prompt = random_ids(length)
        params = replace(PENALISED, prompt_logprobs=3)
        answer = await pair.generate(prompt, params, local=local)
        assert sorted(answer.scores) == list(range(1, length))
        assert sorted(answer.logprobs) == list(range(12))
        check(hf, prompt, answer, 3)
    await pair.idle()


@pytest.mark.parametrize("local", [False, True], ids=["on prefill", "on decode"])
async def test_scoring_ends_with_the_prompt(pair: Pair, hf: torch.nn.Module, local: bool) -> None:
    steps = pair.decodes[0].status().steps
    for length in (1, 40):
        prompt = random_ids(length)
        params = SamplingParams(max_tokens=0, prompt_logprobs=2)
        answer = await pair.generate(prompt, params, local=local)
        assert (answer.tokens, answer.finish) == ({}, FinishReason.LENGTH)
        assert sorted(answer.scores) == list(range(1, length))
        check(hf, prompt, answer, 2)
        assert answer.spans
        await pair.idle()
    if not local:
        assert pair.decodes[0].status().steps == steps


async def test_a_prompt_that_fills_the_pool_can_be_scored(model: str) -> None:
    sizes = {"prefill_blocks": 4, "decode_blocks": 4}
    async with running_pair(
        model, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS, **sizes
    ) as pair:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        for local in (False, True):
            answer = await pair.generate(random_ids(64), params, local=local)
            assert len(answer.scores) == 63
        await pair.idle()


async def test_alone_in_a_batch_preempted_and_resumed_are_the_same(
    model: str, hf: torch.nn.Module
) -> None:
    params = replace(PENALISED, max_tokens=60, prompt_logprobs=3)
    prompts = [random_ids(20, seed=i) for i in range(5)]
    async with running_pair(
        model, decode_blocks=12, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS
    ) as pair:
        alone = await pair.generate(prompts[0], params)
        before = pair.decodes[0].status().counters[messages.PREEMPTIONS]
        asked = (pair.generate(p, params, local=i >= 3) for i, p in enumerate(prompts))
        answers = await pair.at_once(asked, running=3)
        assert pair.decodes[0].status().counters[messages.PREEMPTIONS] > before
        assert answers[0].ids() == alone.ids()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert sorted(answer.scores) == list(range(1, 20))
            check(hf, prompt, answer, 3)
        resumed = await pair.router.submit(
            prompts[0],
            replace(params, prompt_logprobs=None),
            pair.decode_refs[0],
            pair.prefill_refs[0],
            output=alone.ids()[:30],
            attempt=1,
        )
        rest = await pair.router.answer(resumed)
        assert rest.ids() == alone.ids()[30:]
        for index, entry in rest.logprobs.items():
            same = alone.logprobs[index]
            assert entry is not None
            assert same is not None
            assert entry.logprob == pytest.approx(same.logprob, abs=TOLERANCE)
        await pair.idle()


async def test_the_real_model(smollm2: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    rng = random.Random(4)
    prompt = [rng.randrange(49152) for _ in range(70)]
    params = replace(PENALISED, max_tokens=8, prompt_logprobs=3)
    async with running_pair(str(smollm2)) as pair:
        answer = await pair.generate(prompt, params)
        check(hf, prompt, answer, 3)
        assert len(answer.scores) == 69
        ids = torch.tensor([prompt])
        plain = replace(GREEDY, max_tokens=8, repetition_penalty=1.3)
        want = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            repetition_penalty=1.3,
            eos_token_id=None,
            pad_token_id=0,
        )
        got = await pair.generate(prompt, plain)
        assert got.ids() == want[0, 70:].tolist()
        await pair.idle()
