"""Real text of several families: SmolLM2's first layers as other families' checkpoints, and all of
Gemma 3."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig
from protocol.sampling import SamplingParams
from tests.support.families import redress_smollm2
from tests.support.gemma3 import gemma3_folder
from tests.support.local_engine import LocalEngine
from tests.support.smollm2 import TeacherForced, first_layers

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TEXTS = ["The capital of France is", "def fibonacci(n):\n    "]


def answers(folder: Path, prompts: list[list[int]], *, num_blocks: int = 120) -> list[list[int]]:
    engine = LocalEngine(
        EngineConfig(
            model_path=str(folder),
            dtype="float32",
            num_threads=1,
            num_blocks=num_blocks,
            block_size=16,
            max_model_len=1024,
            max_step_tokens=256,
        )
    )
    try:
        return engine.generate([(ids, GREEDY) for ids in prompts])
    finally:
        engine.close()


@pytest.fixture(scope="module")
def few_layers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third of them."""
    return first_layers(smollm2, tmp_path_factory.mktemp("layers") / "smollm2", 10)


@pytest.fixture(scope="module")
def smollm2_answers(few_layers: Path) -> tuple[list[list[int]], list[list[int]]]:
    tokenizer = Tokenizer.from_file(str(few_layers / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    return prompts, answers(few_layers, prompts)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Phi3", "Granite"])
def test_smollm2_in_the_dress_of_another_family_says_the_same(
    family: str,
    few_layers: Path,
    smollm2_answers: tuple[list[list[int]], list[list[int]]],
    tmp_path: Path,
) -> None:
    prompts, expected = smollm2_answers
    folder = redress_smollm2(few_layers, tmp_path / family, family)
    assert answers(folder, prompts) == expected


def test_smollm2_in_the_dress_of_gemma_2_says_what_transformers_says(
    few_layers: Path, smollm2_answers: tuple[list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    """One prompt is longer than its window of 16 tokens."""
    prompts = [smollm2_answers[0][0], smollm2_answers[0][1] * 4]
    assert len(prompts[1]) > 16
    folder = redress_smollm2(few_layers, tmp_path / "Gemma2", "Gemma2")
    assert TeacherForced(folder, "eager").differences(prompts, answers(folder, prompts)) == {}


@pytest.mark.timeout(1200)  # it may be fetched first
def test_gemma_3_says_what_it_says_in_transformers() -> None:
    """One prompt is longer than its window of 512 tokens."""
    try:
        folder = gemma3_folder()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"Gemma 3 270M cannot be fetched: {error}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    long = "The quick brown fox jumps over the lazy dog and runs away from the hunters. " * 40
    prompts = [tokenizer.encode(text).ids for text in [*TEXTS, long]]
    assert len(prompts[2]) > 600
    # As many bytes: a block holds 3 of its 18 layers.
    outputs = answers(folder, prompts, num_blocks=6 * 120)
    assert tokenizer.decode(outputs[0]).startswith(" the capital of the country of France")
    assert TeacherForced(folder).differences(prompts, outputs) == {}
