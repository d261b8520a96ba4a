"""The real small model's first layers in quantised formats, against transformers on the matrices
that the formats mean: 576 inputs are no multiple of 128."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields
from tokenizers import Tokenizer

from engine.batch import StepBatch
from engine.config import EngineConfig
from protocol.sampling import SamplingParams
from tests.support.engine import chunk, prompt, whole_runner
from tests.support.local_engine import LocalEngine
from tests.support.packing import PACKINGS, pack_checkpoint
from tests.support.smollm2 import TeacherForced, first_layers
from tests.support.sources import ROOT

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
FORMATS = {
    "fp8-blocks": replace(PACKINGS["fp8-blocks"], block=128),
    "awq": replace(PACKINGS["awq"], group=64),
    "gptq-ordered": replace(PACKINGS["gptq-ordered"], group=128),
}


@pytest.fixture(scope="module")
def few_layers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_layers(smollm2, tmp_path_factory.mktemp("layers") / "smollm2", 2)


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_ids_are_those_of_transformers(few_layers: Path, tmp_path: Path, name: str) -> None:
    quantised, reference = tmp_path / "quantised", tmp_path / "reference"
    pack_checkpoint(few_layers, quantised, reference, FORMATS[name])
    engine = LocalEngine(
        EngineConfig(model_path=str(quantised), dtype="float32", num_threads=1, num_blocks=80)
    )
    prompts = [prompt(length, vocab=49152) for length in (1, 17, 100)]
    outputs = engine.generate([(ids, GREEDY) for ids in prompts])
    assert TeacherForced(reference).differences(prompts, outputs) == {}


def perplexity(folder: Path, ids: list[int], dtype: str) -> float:
    """Of a text, by one engine."""
    runner = whole_runner(str(folder), dtype=dtype, num_blocks=1 + len(ids) // 8)
    step = replace_fields(chunk(ids, 0, range(1 + len(ids) // 8), None), targets=tuple(ids[1:]))
    result = runner.submit(runner.prepare(StepBatch(sequences=(step,)))).wait()
    scores = [entry.logprob for entry in result.target_logprobs[0]]
    return math.exp(-sum(scores) / len(scores))


def test_perplexity_is_that_of_the_matrices(smollm2: Path, tmp_path: Path) -> None:
    """Of the whole model, by kernels that read codes beside float32 on what they mean."""
    quantised, reference = tmp_path / "quantised", tmp_path / "reference"
    pack_checkpoint(smollm2, quantised, reference, FORMATS["awq"])
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")  # it stays as it is
    ids = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids[:1537]
    want = perplexity(reference, ids, "float32")
    assert 5 < want < 100
    assert perplexity(quantised, ids, "bfloat16") == pytest.approx(want, rel=1e-3)
