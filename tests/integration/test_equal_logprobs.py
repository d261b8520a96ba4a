"""Log-probabilities of decode and of scoring the same text are equal to the bit: over the compiled
CPU kernels no row depends on what else is in its step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.kernels.native.build import has_matrix_unit, load_library
from protocol.ids import Role
from protocol.sampling import SamplingParams
from tests.support.families import save_family
from tests.support.pair import running_pair
from tests.support.prompts import random_ids
from tests.support.tiny import save_tiny_llama
from worker_runtime.config import WorkerConfig

pytestmark = pytest.mark.skipif(
    load_library() is None or has_matrix_unit(), reason="other kernels serve this processor"
)
OUTPUT = SamplingParams(temperature=0.9, seed=3, max_tokens=130, ignore_eos=True, logprobs=2)
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=2)
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "head_dim": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
}


async def check(
    path: str, engine: dict[str, Any], prompts: list[list[int]], output: Any, ranks: int = 1
) -> None:
    """Decode prompts together, then score each text on prefill, in chunks of other sizes, and on
    decode, beside the others."""
    wide = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=75)
    narrow = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=33)
    async with running_pair(
        path,
        dtype="bfloat16",
        prefill_config=wide,
        decode_config=narrow,
        engines=dict.fromkeys(Role, engine),
        decode_blocks=512,
        prefill_tp=ranks,
        decode_tp=ranks,
        block_sizes=(32, 16),
    ) as pair:
        answers = await asyncio.gather(*(pair.generate(p, output, local=p[0] < 9) for p in prompts))
        texts = [prompt + answer.ids() for prompt, answer in zip(prompts, answers, strict=True)]
        for local in (False, True):
            scored = await asyncio.gather(
                *(pair.generate(text, SCORED, local=local) for text in texts)
            )
            for prompt, answer, score in zip(prompts, answers, scored, strict=True):
                for index in range(output.max_tokens):
                    assert answer.logprobs[index] == score.scores[len(prompt) + index], index
        await pair.idle()


@pytest.mark.parametrize("family", ["llama-yarn", "mistral-window", "gemma2"])
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
async def test_every_kind_of_kv(tmp_path: Path, kv_dtype: str | None, family: str) -> None:
    """All tokens, a window of some, and both with softcaps."""
    windows = {} if family == "llama-yarn" else {"sliding_window": 41}
    path = save_family(family, tmp_path, head_dim=64, **windows)
    prompts = [[9 * (seed % 2), *random_ids(n, seed=seed)] for seed, n in enumerate((30, 1, 75))]
    await check(path, {"kv_dtype": kv_dtype}, prompts, OUTPUT)


@pytest.mark.parametrize(("quantization", "ranks"), [("int8", 1), ("int4", 2)])
async def test_every_kind_of_weights(tmp_path: Path, quantization: str, ranks: int) -> None:
    path = save_tiny_llama(tmp_path, **SIZES)
    prompts = [[9 * (seed % 2), *random_ids(n, seed=seed)] for seed, n in enumerate((30, 12))]
    engine = {"quantization": quantization, "kv_dtype": "fp8"}
    await check(path, engine, prompts, OUTPUT, ranks)
