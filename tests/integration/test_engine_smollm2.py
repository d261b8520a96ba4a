"""The real small model against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.batch import StepBatch
from engine.config import EngineConfig
from protocol.sampling import SamplingParams
from tests.support.engine import chunk, logits_of, prompt, whole_runner
from tests.support.local_engine import LocalEngine
from tests.support.smollm2 import TeacherForced

pytestmark = pytest.mark.slow
CHUNK = 256
LENGTHS = [1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def settings(smollm2: Path, **changes: object) -> EngineConfig:
    base: dict[str, object] = {
        "model_path": str(smollm2),
        "dtype": "float32",
        "num_threads": 1,
        "num_blocks": 300,
        "max_step_tokens": CHUNK,
    }
    return EngineConfig(**(base | changes))  # type: ignore[arg-type]


def test_greedy_ids_are_those_of_transformers_at_every_length(smollm2: Path) -> None:
    oracle = TeacherForced(smollm2)
    engine = LocalEngine(settings(smollm2))
    prompts = [prompt(length, vocab=49152) for length in LENGTHS]
    outputs = engine.generate([(ids, GREEDY) for ids in prompts])
    assert all(len(output) == 24 for output in outputs)
    assert oracle.differences(prompts, outputs) == {}


def test_seeded_ids_are_equal_alone_in_a_batch_and_after_preemption(smollm2: Path) -> None:
    sampled = replace(GREEDY, temperature=0.9, top_p=0.95, top_k=200, min_p=0.01)
    requests = [(prompt(10 + 9 * i, vocab=49152), replace(sampled, seed=i)) for i in range(8)]
    together = LocalEngine(settings(smollm2)).generate(requests)
    alone = LocalEngine(settings(smollm2))
    assert [alone.generate([request])[0] for request in requests[:4]] == together[:4]
    tight = LocalEngine(settings(smollm2, num_blocks=20))
    assert tight.generate(requests) == together
    assert tight.preemptions > 0


def test_bfloat16_logits_stay_near_float32(smollm2: Path) -> None:
    ids = prompt(300, vocab=49152)
    step = StepBatch(sequences=(chunk(ids, 0, range(19)),))
    changes = {"block_size": 16, "num_blocks": 20}
    exact = logits_of(whole_runner(str(smollm2), **changes), step)
    rounded = logits_of(whole_runner(str(smollm2), dtype="bfloat16", **changes), step)
    assert exact is not None
    assert rounded is not None
    spread = exact.std()
    assert ((rounded.float() - exact).abs() / spread).max() < 0.5
    assert ((rounded.float() - exact).pow(2).mean().sqrt() / spread) < 0.06


def test_bfloat16_ids_differ_only_at_near_ties(smollm2: Path) -> None:
    engine = LocalEngine(settings(smollm2, dtype="bfloat16"))
    ids = prompt(100, vocab=49152)
    output = engine.generate([(ids, GREEDY)])[0]
    runner = whole_runner(str(smollm2), block_size=16, num_blocks=20)
    for index, token in enumerate(output):
        step = StepBatch(sequences=(chunk([*ids, *output[:index]], 0, range(8)),))
        logits = logits_of(runner, step)
        assert logits is not None
        assert float(logits[0].max() - logits[0, token]) < 0.5
