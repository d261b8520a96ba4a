"""Pools whose KV has different types: it is converted where it leaves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.batch import StepBatch
from kv_transfer.config import ChecksumKind, TransferConfig
from observability import metrics
from observability.metrics import counter_key
from protocol.ids import Role
from protocol.sampling import SamplingParams
from tests.support.engine import chunk, config, prompt, whole_runner
from tests.support.local_engine import LocalEngine
from tests.support.pair import SMALL_STEPS, running_pair

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT, OTHER = prompt(75, seed=3), prompt(40, seed=4)
FP8: dict[str, Any] = {"kv_dtype": "fp8"}
SUMMED = TransferConfig(checksum=ChecksumKind.CRC32)


def in_turn(path: str, first: dict[str, Any], second: dict[str, Any]) -> list[int]:
    """The ids of a prompt computed by one engine, and continued, on its KV as another's pool has
    it, by that."""
    ahead, behind = (whole_runner(path, block_size=16, num_blocks=16, **k) for k in (first, second))
    table = range(8)
    step = chunk(PROMPT, 0, table, GREEDY)
    tokens = list(ahead.submit(ahead.prepare(StepBatch(sequences=(step,)))).wait().tokens)
    for ours, theirs in zip(behind.pool.layers, ahead.pool.layers, strict=True):
        ours.copy_(theirs)
    while len(tokens) < GREEDY.max_tokens:
        step = chunk(tokens[-1:], len(PROMPT) + len(tokens) - 1, table, GREEDY)
        tokens += behind.submit(behind.prepare(StepBatch(sequences=(step,)))).wait().tokens
    return tokens


@pytest.mark.parametrize(
    ("prefill", "decode", "ranks", "sizes"),
    [
        ({}, FP8, (1, 1), (16, 16)),
        (FP8, {}, (1, 1), (16, 8)),
        ({}, FP8, (2, 1), (8, 16)),
        (FP8, FP8, (1, 1), (16, 16)),
    ],
)
async def test_ids_are_those_of_one_engine_after_the_other(
    model: str, prefill: dict[str, Any], decode: dict[str, Any], ranks: tuple, sizes: tuple
) -> None:
    """Where one side has codes, a byte for each value travels."""
    async with running_pair(
        model,
        prefill_config=SMALL_STEPS,
        decode_config=SMALL_STEPS,
        engines={Role.PREFILL: prefill, Role.DECODE: decode},
        prefill_tp=ranks[0],
        decode_tp=ranks[1],
        block_sizes=sizes,
        transfer=SUMMED,
    ) as pair:
        answer = await pair.generate(PROMPT, GREEDY)
        assert answer.ids() == in_turn(model, prefill, decode)
        local = await pair.generate(OTHER, GREEDY, local=True)
        alone = LocalEngine(config(model, block_size=sizes[1], **decode))
        assert local.ids() == alone.generate([(OTHER, GREEDY)])[0]
        await pair.idle()
        layout = pair.decodes[0].status().layout
        dtype = prefill.get("kv_dtype") or decode.get("kv_dtype") or ""
        tokens = -(-len(PROMPT) // min(sizes)) * min(sizes)  # whole cells
        moved = replace(layout, dtype="float8_e4m3fn" if dtype else "float32").token_bytes()
        for worker in (pair.prefills[0], pair.decodes[0]):
            counters = worker.status().counters
            assert counters[counter_key(metrics.HANDOFF_BYTES)] == tokens * moved
