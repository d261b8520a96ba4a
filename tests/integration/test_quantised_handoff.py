"""Quantised weights before and after the hand-off, alike and of two precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.batch import StepBatch
from protocol.ids import Role
from protocol.sampling import SamplingParams
from tests.support.engine import chunk, config, prompt, whole_runner
from tests.support.local_engine import LocalEngine
from tests.support.packing import PACKINGS, pack_checkpoint
from tests.support.pair import SMALL_STEPS, running_pair
from tests.support.tiny import Oracle, save_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = prompt(75, seed=3)


@pytest.mark.parametrize(("name", "ranks"), [("fp8-blocks", 1), ("gptq-ordered", 2)])
async def test_ids_are_those_of_the_dequantised_model(
    model: str, tmp_path: Path, name: str, ranks: int
) -> None:
    quantised, reference = tmp_path / "quantised", tmp_path / "reference"
    pack_checkpoint(Path(model), quantised, reference, PACKINGS[name])
    async with running_pair(
        str(quantised), prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS, decode_tp=ranks
    ) as pair:
        answer = await pair.generate(PROMPT, GREEDY)
        assert answer.ids() == Oracle(str(reference)).greedy(PROMPT, 12)
        assert (
            pair.decodes[0].status().precision
            == {
                "fp8-blocks": "fp8 32x32",
                "gptq-ordered": "gptq int4 g32",
            }[name]
        )
        await pair.idle()


def in_turn(path: str, first: str, second: str) -> list[int]:
    """The ids of a prompt computed by one engine, and continued, on its KV, by another."""
    ahead, behind = (
        whole_runner(path, quantization=kind, block_size=16, num_blocks=16)
        for kind in (first, second)
    )
    table = range(8)
    step = chunk(PROMPT, 0, table, GREEDY)
    tokens = list(ahead.submit(ahead.prepare(StepBatch(sequences=(step,)))).wait().tokens)
    for ours, theirs in zip(behind.pool.layers, ahead.pool.layers, strict=True):
        ours.copy_(theirs)
    while len(tokens) < GREEDY.max_tokens:
        step = chunk(tokens[-1:], len(PROMPT) + len(tokens) - 1, table, GREEDY)
        tokens += behind.submit(behind.prepare(StepBatch(sequences=(step,)))).wait().tokens
    return tokens


async def test_the_same_ids_with_fp8_kv_and_slices_that_cut_groups(tmp_path: Path) -> None:
    """Three ranks of 24 to 48 columns, groups of 32, before one rank of another block size."""
    sizes = {"hidden_size": 72, "head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
    plain = Path(save_tiny_llama(tmp_path / "plain", **sizes, intermediate_size=88))
    pack_checkpoint(plain, tmp_path / "quantised", tmp_path / "reference", PACKINGS["awq"])
    kv: dict[str, Any] = {"kv_dtype": "fp8"}
    async with running_pair(
        str(tmp_path / "quantised"),
        prefill_config=SMALL_STEPS,
        decode_config=SMALL_STEPS,
        prefill_tp=3,
        block_sizes=(8, 16),
        engines=dict.fromkeys(Role, kv),
    ) as pair:
        answer = await pair.generate(PROMPT, GREEDY)
        alone = LocalEngine(config(str(tmp_path / "reference"), block_size=16, **kv))
        assert answer.ids() == alone.generate([(PROMPT, GREEDY)])[0]
        await pair.idle()


async def test_a_family_prefills_in_one_precision_and_decodes_in_another(model: str) -> None:
    family: dict[str, Any] = {"kv_family": "tiny"}
    engines = {
        Role.PREFILL: {"quantization": "fp8", **family},
        Role.DECODE: {"quantization": "int4", **family},
    }
    async with running_pair(
        model, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS, engines=engines
    ) as pair:
        answer = await pair.generate(PROMPT, GREEDY)
        assert answer.ids() == in_turn(model, "fp8", "int4")
        statuses = [worker.status() for worker in (*pair.prefills, *pair.decodes)]
        assert [status.precision for status in statuses] == ["fp8", "int4"]
        await pair.idle()


async def test_without_a_family_two_precisions_do_not_meet(model: str) -> None:
    engines = {Role.PREFILL: {"quantization": "fp8"}, Role.DECODE: {"quantization": "int4"}}
    async with running_pair(model, engines=engines) as pair:
        answer = await pair.generate(PROMPT, GREEDY)
        assert not answer.tokens
        assert {failure.error.param for failure in answer.failures} == {"weights"}
        local = await pair.generate(PROMPT, GREEDY, local=True)
        alone = LocalEngine(config(model, quantization="int4", block_size=16))
        assert local.ids() == alone.generate([(PROMPT, GREEDY)])[0]
        await pair.idle()
