"""Hand-offs between workers of different tensor-parallel degrees, each rank a process."""

from __future__ import annotations

import asyncio

import pytest

from protocol.sampling import SamplingParams
from tests.support.pair import SMALL_STEPS, running_pair
from tests.support.tiny import Oracle, save_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=8, ignore_eos=True)

MODELS = {
    "two KV heads, biases, odd vocabulary": {"vocab_size": 131, "attention_bias": True},
    "four KV heads, tied, llama3 RoPE": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), **MODELS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]
)
async def test_every_pair_of_degrees_gives_the_ids_of_transformers(
    model: str, oracle: Oracle, prefill_tp: int, decode_tp: int
) -> None:
    prompts = [[(7 * i + j) % 120 for j in range(length)] for i, length in enumerate([1, 17, 75])]
    async with running_pair(
        model,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_config=SMALL_STEPS,
        decode_config=SMALL_STEPS,
    ) as pair:
        answers = await asyncio.gather(*(pair.generate(p, GREEDY) for p in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids() == oracle.greedy(prompt, 8)
        handed_over = await pair.generate(prompts[1], SEEDED)
        on_decode = await pair.generate(prompts[1], SEEDED, local=True)
        assert handed_over.ids() == on_decode.ids()
        await pair.idle()
