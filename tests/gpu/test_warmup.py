"""After an engine's warm-up no step has to wait for a compiler."""

import random

import pytest
import torch
import triton
import triton.language as tl

from engine.batch import StepBatch
from engine.executor import Executor
from protocol.sampling import SamplingParams
from tests.support.cuda import (
    GREEDY,
    NUM_BLOCKS,
    SEEDED,
    for_groups,
    make_runner,
    mask,
    seq,
    tiny_config,
)

SAMPLINGS = (GREEDY, SEEDED, SamplingParams(temperature=1.0, seed=3), None)


def random_batch(rng):
    steps = []
    budget = 128
    for _ in range(rng.randint(1, 8)):
        start = rng.randint(0, 40)
        count = min(1 if rng.random() < 0.4 else rng.randint(1, 90), budget)
        if count == 0:
            break
        budget -= count if count > 1 else 0
        blocks = [rng.randrange(NUM_BLOCKS) for _ in range(-(-(start + count) // 16))]
        sampling = rng.choice(SAMPLINGS if count > 1 else SAMPLINGS[:3])
        allowed = mask(3, 50, 202) if sampling and rng.random() < 0.2 else None
        tokens = [rng.randrange(203) for _ in range(count)]
        steps.append(seq(tokens, start, blocks, sampling, allowed=allowed))
    return StepBatch(sequences=tuple(steps))


@triton.jit
def newcomer(x, value: tl.constexpr):
    """Shows that compilations are seen, whatever other tests have had compiled."""
    tl.store(x, value)


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "sliding_window": 18,
    "query_pre_attn_scalar": 24,
}


@pytest.mark.parametrize(
    ("dtype", "changes"), [("float32", {}), ("bfloat16", {}), ("bfloat16", GEMMA3)]
)
def test_nothing_is_compiled_while_serving(device, dtype, changes, monkeypatch):
    compiled = []

    def note(**event):
        compiled.append(event["repr"])

    runner = make_runner(device, tiny_config(**changes), dtype=dtype)
    runner.start()
    executor = Executor(runner, fingerprint=None)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    executor.warmup()
    newcomer[(1,)](torch.zeros(1, device=device), value=len(dtype) + len(changes))
    assert len([name for name in compiled if "newcomer" in name]) == 1
    compiled.clear()
    rng = random.Random(11)
    for _ in range(150):
        executor.run(for_groups(random_batch(rng), runner.layout))
    assert compiled == []


def test_nothing_is_compiled_for_large_steps(device, monkeypatch):
    """Steps that have no graph: long chunks, with and without history, and scored ones."""
    compiled = []
    config = tiny_config(max_position_embeddings=6000)
    runner = make_runner(device, config, dtype="bfloat16", max_chunk_tokens=4096)
    runner.open(800)
    runner.start()
    executor = Executor(runner, fingerprint=None)
    executor.warmup()
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event)
    )
    table = range(375)
    for count, start in ((900, 0), (1100, 0), (1300, 3000), (2000, 2048), (800, 4500), (1, 70)):
        decode = seq([5], 90, range(380, 386))
        sampling = GREEDY if count > 1 else SEEDED
        chunk = seq([7] * count, start, table, sampling)
        scored = seq([7] * 30, start, table, None, targets=(1,) * 30)
        for batch in (
            [chunk],
            [decode, chunk],
            [scored],
            [decode, scored],
            [decode, chunk, scored],
        ):
            executor.run(StepBatch(sequences=tuple(batch)))
    assert compiled == []
