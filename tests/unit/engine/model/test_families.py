"""Every family against transformers (eager, float32), on random weights of odd sizes."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from engine.batch import StepBatch
from engine.errors import ModelRefused
from engine.model.families import load_model_config
from engine.model.sharding import allowed_degrees, share_of
from protocol.sampling import SamplingParams
from tests.support.engine import (
    ThreadedRanks,
    chunk,
    config,
    hf_logits,
    logits_of,
    prompt,
    whole_runner,
)
from tests.support.families import CASES, save_family
from tests.support.local_engine import LocalEngine
from tests.support.tiny import Oracle

LENGTH = 90
CHUNKS = [[90], [1] * 30, [10, 1, 2, 11, 12, 13, 1, 40], [17, 16, 57]]


@pytest.fixture(params=list(CASES), scope="module")
def family(request, tmp_path_factory):
    """(path, ids, transformers' logits of every position) of one case."""
    path = save_family(request.param, tmp_path_factory.mktemp("family"))
    ids = prompt(LENGTH)
    return path, ids, hf_logits(path, ids)


NUM_BLOCKS = 512
BLOCKS = [5, 3, 60, 7, 8, 9, 10, 11, 0, 1, 2, 40]


def tables_at(layout, start):
    """Tables of a sequence at position `start`: each group has 64 blocks of its own."""
    return tuple(
        tuple(64 * index + b for b in BLOCKS[group.first_token(start) // layout.block_size :])
        for index, group in enumerate(layout.groups)
    )


def in_chunks(run, layout, ids, sizes):
    """Logits of the last position of every chunk."""
    found, start = [], 0
    for size in sizes:
        step = chunk(ids[start : start + size], start, ())
        step = replace(step, block_tables=tables_at(layout, start))
        found.append(run(StepBatch(sequences=(step,)))[0])
        start += size
    return torch.stack(found)


@pytest.mark.parametrize("sizes", CHUNKS, ids=["whole", "tokens", "around windows", "blocks"])
def test_logits_equal_transformers_however_the_prompt_is_cut(family, sizes):
    path, ids, expected = family
    runner = whole_runner(path, num_blocks=NUM_BLOCKS)
    found = in_chunks(lambda batch: logits_of(runner, batch), runner.layout, ids, sizes)
    ends = torch.tensor(sizes).cumsum(0) - 1
    torch.testing.assert_close(found, expected[ends], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_same_logits(family, size):
    """Four ranks replicate the two KV heads; where layers differ in theirs, ranks cannot."""
    path, ids, expected = family
    model = load_model_config(path)
    if size not in allowed_degrees(model):
        with pytest.raises(ModelRefused, match="over 2 or 8 KV heads; allowed: 1, 2"):
            share_of(model, 0, size)
        return
    with ThreadedRanks(path, size, num_blocks=NUM_BLOCKS) as ranks:
        found = in_chunks(ranks.logits, ranks.layout, ids, [40, 1, 49])
    torch.testing.assert_close(found, expected[[39, 40, 89]], rtol=1e-3, atol=1e-3)


def test_greedy_ids_equal_transformers(family):
    """All prompts are longer than what longrope was trained at: transformers takes the long factors
    from there on, a deployment of long contexts always."""
    path, _, _ = family
    prompts = [prompt(length, seed=3) for length in (66, 80, 101)]
    engine, oracle = LocalEngine(config(path, num_blocks=128)), Oracle(path)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = engine.generate([(ids, sampling) for ids in prompts])
    assert found == [oracle.greedy(ids, 20) for ids in prompts]


def test_bfloat16_errs_no_more_than_transformers_does(family):
    path, ids, expected = family
    runner = whole_runner(path, dtype="bfloat16", num_blocks=NUM_BLOCKS)
    step = replace(chunk(ids, 0, ()), block_tables=tables_at(runner.layout, 0))
    found = logits_of(runner, StepBatch(sequences=(step,)))[0].float()
    theirs = hf_logits(path, ids, torch.bfloat16)[-1].float()

    def error(logits):
        return (logits - expected[-1]).pow(2).mean().sqrt()

    assert error(found) < 1.5 * error(theirs)
