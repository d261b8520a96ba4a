"""Scales of KV that a checkpoint was calibrated with: part of the matrices, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import StepBatch
from engine.errors import ModelRefused
from engine.kernels.native.build import load_library
from engine.model.checkpoint import Checkpoint
from engine.model.families import parse_model_config
from engine.model.kv_scales import describe_kv_scales, read_kv_scales
from tests.support.engine import ThreadedRanks, chunk, logits_of, prompt, whole_runner
from tests.support.families import save_family
from tests.support.packing import PACKINGS, pack_checkpoint
from tests.support.tiny import save_tiny_llama

IDS = prompt(24)
STEPS = [
    StepBatch(sequences=(chunk(IDS[a:b], a, range(4)),)) for a, b in ((0, 9), (9, 23), (23, 24))
]


def calibrated(folder: Path, to: Path, scales: dict[str, Any], **config: Any) -> str:
    """A copy with further tensors, and settings of its quantisation."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    tensors |= {
        f"model.layers.{name}": value if isinstance(value, torch.Tensor) else torch.tensor([value])
        for name, value in scales.items()
    }
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((to / "config.json").read_text())
    raw.setdefault("quantization_config", {"quant_method": "compressed-tensors"})
    raw["quantization_config"] |= {"kv_cache_scheme": {"num_bits": 8, "type": "float"}} | config
    (to / "config.json").write_text(json.dumps(raw))
    return str(to)


def layers(count: int, names: tuple[str, str] = ("k_scale", "v_scale")) -> dict[str, float]:
    """Scales below and above 1, of every layer."""
    found = {}
    for index in range(count):
        found[f"{index}.self_attn.{names[0]}"] = 0.02 * (index + 1)
        found[f"{index}.self_attn.{names[1]}"] = 3.0 + index
    return found


def logits(path: str, **changes: Any) -> torch.Tensor:
    runner = whole_runner(path, **changes)
    made = [logits_of(runner, step) for step in STEPS]
    return torch.cat([part for part in made if part is not None])


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "phi3", "olmo2", "gemma3"])
def test_results_are_those_without_scales(tmp_path, case):
    """Biases, norms of heads and of all heads, fused and offset ones. Libraries round by where in
    memory a matrix begins, the compiled kernels do not."""
    window = {"sliding_window": 256} if case == "gemma3" else {}  # of all that there is
    plain = Path(save_family(case, tmp_path / "plain", head_dim=64, **window))
    count = json.loads((plain / "config.json").read_text())["num_hidden_layers"]
    scaled = calibrated(plain, tmp_path / "scaled", layers(count))
    want = logits(str(plain), dtype="float32")
    torch.testing.assert_close(logits(scaled, dtype="float32"), want, rtol=1e-4, atol=1e-4)
    if load_library() is not None:
        assert torch.equal(*(logits(str(path), dtype="bfloat16") for path in (plain, scaled)))


@pytest.mark.parametrize("name", ["fp8-channel", "gptq-ordered", "awq"])
def test_quantised_matrices_and_ranks(tmp_path, name):
    sizes = {"hidden_size": 72, "head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
    plain = Path(save_tiny_llama(tmp_path / "plain", **sizes, intermediate_size=88))
    pack_checkpoint(plain, tmp_path / "packed", tmp_path / "reference", PACKINGS[name])
    scales = layers(2, ("k_proj.output_scale", "v_proj.output_scale"))
    scaled = calibrated(tmp_path / "packed", tmp_path / "scaled", scales)
    want = logits(str(tmp_path / "packed"))
    torch.testing.assert_close(logits(scaled), want, rtol=1e-5, atol=1e-5)
    with ThreadedRanks(scaled, 3) as ranks:
        got = [ranks.logits(step) for step in STEPS]
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-4, atol=1e-4)


def test_keys_beyond_the_range_of_codes(tmp_path):
    """Without scales they are clipped to 448, and the results are others."""
    plain = Path(save_tiny_llama(tmp_path / "plain"))
    tensors = load_file(plain / "model.safetensors")
    for name in tensors:
        if "k_proj" in name or "v_proj" in name:
            tensors[name] *= 256
        if "q_proj" in name or "o_proj" in name:
            tensors[name] /= 256
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    scales = {f"{i}.self_attn.{kind}_scale": 200.0 for i in range(2) for kind in "kv"}
    scaled = calibrated(plain, tmp_path / "scaled", scales)
    want = logits(str(plain))
    torch.testing.assert_close(logits(scaled), want, rtol=1e-5, atol=1e-5)
    errors = [float((logits(path, kv_dtype="fp8") - want).norm()) for path in (str(plain), scaled)]
    assert errors[1] < 0.5 * errors[0]


def test_powers_of_two_that_clip_nothing(tmp_path):
    plain = Path(save_tiny_llama(tmp_path / "plain"))
    scales = dict(zip(layers(2), (0.25, 0.26, 1.0, 448.0), strict=True))
    source = Checkpoint(calibrated(plain, tmp_path / "scaled", scales), torch.float32)
    assert describe_kv_scales(read_kv_scales(source, 2)) == "-2,-1,0,9"
    assert describe_kv_scales(read_kv_scales(Checkpoint(plain, torch.float32), 2)) == ""


def test_kv_of_other_scales_does_not_meet_in_a_family(tmp_path):
    plain = Path(save_tiny_llama(tmp_path / "plain"))
    scaled = calibrated(plain, tmp_path / "scaled", layers(2))
    marks = [whole_runner(str(path), kv_family="tiny").fingerprint for path in (plain, scaled)]
    assert marks[0].differing_field(marks[1]) == "weights"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "is 0.0, which is no scale"),
        (-0.5, "no scale"),
        (float("nan"), "no scale"),
        (torch.ones(3), r"float32 \[3\], not one number"),
        (torch.ones(1, dtype=torch.int32), "not one number"),
        (None, "is missing, but other layers have scales of KV"),
    ],
)
def test_damage_is_refused_by_tensor_and_file(tmp_path, value, words):
    plain = Path(save_tiny_llama(tmp_path / "plain"))
    name = "1.self_attn.v_scale"
    scales = layers(2) | {name: value}
    if value is None:
        del scales[name]
    path = calibrated(plain, tmp_path / "scaled", scales)
    with pytest.raises(ModelRefused, match=words) as caught:
        whole_runner(path)
    assert caught.value.param == f"model.layers.{name}"
    assert path in str(caught.value)


def test_a_checkpoint_may_add_nothing_but_scales(tmp_path):
    plain = Path(save_tiny_llama(tmp_path / "plain"))
    path = calibrated(plain, tmp_path / "scaled", layers(2), config_groups={})
    assert (
        parse_model_config(json.loads(Path(path, "config.json").read_text())).quantization is None
    )
