"""Rows that are not finite: found wherever they are, and no others."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from engine.batch import StepBatch
from engine.errors import ModelRefused
from engine.executor import build_executor
from engine.kernels.cpu.operations import CpuKernels
from engine.model.checkpoint import EMBEDDING
from protocol.errors import Internal
from tests.support.engine import GREEDY, chunk, config, prompt, whole_runner
from tests.support.families import save_family
from tests.support.local_engine import LocalEngine
from tests.support.tiny import save_tiny_llama

BAD = 7  # the token whose embedding overflows
GOOD = [token for token in prompt(40) if token != BAD]


def spoiled(folder, value=float("inf"), **changes):
    """A tiny model whose embedding of BAD is `value`."""
    path = save_tiny_llama(folder, tie_word_embeddings=False, **changes)
    weights = load_file(f"{path}/model.safetensors")
    weights[EMBEDDING][BAD] = value
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequences_that_are_not_finite_are_named_and_others_unharmed(tmp_path, value, dtype):
    runner = whole_runner(spoiled(tmp_path, value), dtype=dtype)
    scored = replace(chunk([1, BAD, 3], 0, [12]), targets=(BAD, 3), sampling=None, num_top=0)
    bad = [
        chunk([BAD], 0, [0]),  # a decode
        chunk([1, 2, BAD, 3], 0, [1]),  # a prompt's last chunk
        chunk([1, 2, BAD, 3], 0, [2], None),  # one before its last
        scored,
    ]
    good = [chunk(GOOD[:9], 0, [4, 5]), chunk(GOOD[:5], 0, [6], None), chunk([5], 0, [8])]
    whole = runner.submit(runner.prepare(StepBatch(sequences=(*bad, *good)))).wait()
    alone = runner.submit(runner.prepare(StepBatch(sequences=tuple(good)))).wait()
    assert whole.non_finite == {0, 1, 2, 3}
    assert alone.non_finite == frozenset()
    assert whole.tokens[4:] == alone.tokens


def test_an_overflow_of_later_layers_is_found_in_the_sampled_row(tmp_path):
    """Weights that are finite in float16, activations that are not."""
    path = save_tiny_llama(tmp_path)
    weights = load_file(f"{path}/model.safetensors")
    last = max(name for name in weights if name.endswith("mlp.down_proj.weight"))
    weights[last] *= 60_000.0 / weights[last].abs().max()
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    for dtype, found in (("float16", {0}), ("float32", set())):
        runner = whole_runner(path, dtype=dtype)
        step = StepBatch(sequences=(chunk(GOOD[:9], 0, [0, 1]),))
        assert runner.submit(runner.prepare(step)).wait().non_finite == found


def test_the_probe_refuses_a_model_that_overflows_and_names_the_dtype(tmp_path):
    path = save_tiny_llama(tmp_path)
    weights = load_file(f"{path}/model.safetensors")
    weights["model.norm.weight"] *= 1e30
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    build_executor(config(path)).warmup()
    with pytest.raises(ModelRefused, match="float16") as caught:
        build_executor(config(path, dtype="float16")).warmup()
    assert caught.value.param == "dtype"


def test_the_local_engine_raises(tmp_path):
    engine = LocalEngine(config(spoiled(tmp_path)))
    assert len(engine.generate([(GOOD, GREEDY)])[0]) == GREEDY.max_tokens
    with pytest.raises(Internal, match="not finite"):
        engine.generate([([1, BAD], GREEDY)])


def test_large_finite_values_are_finite(tmp_path):
    """Logits whose sum overflows, though none of them does."""
    runner = whole_runner(save_tiny_llama(tmp_path))
    with torch.inference_mode():
        runner.model._norm.mul_(1e36)
    step = StepBatch(sequences=(chunk(GOOD[:9], 0, [0, 1]),))
    assert runner.submit(runner.prepare(step)).wait().non_finite == frozenset()


def test_kv_heads_of_several_sizes_are_for_torchs_operators(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.cpu.runner.native.serves", lambda geometry: True)
    assert type(whole_runner(save_family("gemma4", tmp_path)).kernels) is CpuKernels
