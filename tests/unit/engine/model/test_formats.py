"""Every quantised format against the same matrices dequantised by the packer, in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import StepBatch
from engine.config import Quantization
from engine.errors import ModelRefused
from engine.model.checkpoint import Checkpoint
from engine.model.families import load_model_config, parse_model_config
from engine.model.formats.stated import names_module, parse_quantization
from engine.model.matrices import matrix_reader
from engine.model.sharding import share_of
from engine.model.weights import WeightLoader
from engine.quantization.weight import dense
from tests.support.engine import ThreadedRanks, chunk, logits_of, prompt, whole_runner
from tests.support.families import save_family
from tests.support.packing import PACKINGS, pack_checkpoint, pack_matrix
from tests.support.tiny import save_tiny_llama

IDS = prompt(24)
STEP = StepBatch(sequences=(chunk(IDS, 0, range(4)),))
#: Three KV heads: ranks get one or two. Slices of 29 to 88 columns cut words, groups and blocks.
SIZES = {
    "hidden_size": 72,
    "head_dim": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 88,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return Path(save_tiny_llama(tmp_path_factory.mktemp("plain"), **SIZES))


@pytest.fixture(scope="module")
def packed(plain, tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """The folder of a format, and that of its reference; made once."""
    home = tmp_path_factory.mktemp("packed")

    def folders(name: str) -> tuple[Path, Path]:
        both = home / name, home / f"{name}-reference"
        if not both[0].exists():
            pack_checkpoint(plain, *both, PACKINGS[name])
        return both

    return folders


def loader(folder: Path, rank: int = 0, size: int = 1) -> WeightLoader:
    config, device = load_model_config(folder), torch.device("cpu")
    source = Checkpoint(folder, torch.float32)
    matrices = matrix_reader(source, config, None, torch.float32)
    return WeightLoader(config, share_of(config, rank, size), source, device, matrices)


def check_matrices(quantised: Path, reference: Path, rank: int = 0, size: int = 1) -> None:
    """All matrices of a rank are those of the reference, to the bit."""
    packed, plain = loader(quantised, rank, size), loader(reference, rank, size)
    for index in range(packed.config.num_layers):
        ours, theirs = packed.layer(index), plain.layer(index)
        for name in ("qkv", "out", "gate_up", "down"):
            weight, expected = getattr(ours, name), getattr(theirs, name)
            assert weight.shape == expected.shape
            assert dense(weight).equal(expected), (index, name)


@pytest.mark.parametrize("name", PACKINGS)
def test_matrices_and_logits_are_those_that_the_format_means(packed, name) -> None:
    quantised, reference = packed(name)
    check_matrices(quantised, reference)
    expected = logits_of(whole_runner(str(reference)), STEP)
    torch.testing.assert_close(logits_of(whole_runner(str(quantised)), STEP), expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PACKINGS)
def test_ranks_read_slices_that_cut_words_groups_and_blocks(packed, name, size) -> None:
    for rank in range(size):
        check_matrices(*packed(name), rank, size)


@pytest.mark.parametrize("name", ["fp8-static", "gptq-ordered"])
def test_ranks_together_have_the_logits_of_one(packed, name) -> None:
    quantised, reference = packed(name)
    expected = logits_of(whole_runner(str(reference)), STEP)
    with ThreadedRanks(str(quantised), 3) as ranks:
        torch.testing.assert_close(ranks.logits(STEP), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", Quantization)
def test_ranks_quantise_at_load_what_one_does(plain, kind) -> None:
    expected = logits_of(whole_runner(str(plain), quantization=kind), STEP)
    with ThreadedRanks(str(plain), 3, quantization=kind) as ranks:
        torch.testing.assert_close(ranks.logits(STEP), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8-static", "fp8-blocks", "int8", "w4a16-zeros"])
def test_fused_projections_with_partial_rotation(tmp_path, name) -> None:
    save_family("phi4-mini", tmp_path / "plain")
    pack_checkpoint(tmp_path / "plain", tmp_path / "a", tmp_path / "b", PACKINGS[name])
    check_matrices(tmp_path / "a", tmp_path / "b")
    check_matrices(tmp_path / "a", tmp_path / "b", 1, 2)


def test_a_head_and_multipliers_are_quantised_too(tmp_path) -> None:
    save_family("granite", tmp_path / "plain")
    path = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(path)
    pack_checkpoint(tmp_path / "plain", tmp_path / "a", tmp_path / "b", PACKINGS["gptq-v2"])
    head = tensors["lm_head.weight"][:128]
    for folder in ("a", "b"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        config["vocab_size"] = 128
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    parts, meant = pack_matrix(head.float(), PACKINGS["gptq-v2"], 0)
    for folder, changes in (
        ("a", {f"lm_head.{name}": part.contiguous() for name, part in parts.items()}),
        ("b", {"lm_head.weight": meant}),
    ):
        file = tmp_path / folder / "model.safetensors"
        content = load_file(file)
        del content["lm_head.weight"]
        content["model.embed_tokens.weight"] = content["model.embed_tokens.weight"][:128].clone()
        save_file(content | changes, file)
    reference = logits_of(whole_runner(str(tmp_path / "b")), STEP)
    quantised = logits_of(whole_runner(str(tmp_path / "a")), STEP)
    torch.testing.assert_close(quantised, reference, rtol=1e-4, atol=1e-5)
    with ThreadedRanks(str(tmp_path / "a"), 2) as ranks:
        torch.testing.assert_close(ranks.logits(STEP), reference, rtol=1e-4, atol=1e-4)


LAYER = "model.layers.1."
#: What is wrong: (format, tensor, what becomes of it, the message).
DAMAGE: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = {
    "an infinite scale": ("awq", "mlp.up_proj.scales", lambda t: t / 0, "not finite"),
    "a negative scale": ("fp8-blocks", "mlp.down_proj.weight_scale_inv", torch.neg, "negative"),
    "lacking scales": ("int8", "mlp.down_proj.weight_scale", lambda t: t[:-1], "shape"),
    "no scales": ("fp8-channel", "self_attn.q_proj.weight_scale", None, "is missing"),
    "no zero points": ("w4a16-zeros", "self_attn.v_proj.weight_zero_point", None, "is missing"),
    "no zero points of GPTQ": ("gptq", "self_attn.v_proj.qzeros", None, "is missing"),
    "lacking codes": ("gptq", "self_attn.o_proj.qweight", lambda t: t[1:], "shape"),
    "codes that are no numbers": (
        "fp8-channel",
        "mlp.gate_proj.weight",
        lambda t: torch.full_like(t.float(), torch.nan).to(t.dtype),
        "not numbers",
    ),
    "no such group": ("gptq-ordered", "mlp.up_proj.g_idx", lambda t: t + 2, "groups outside"),
    "another shape": ("w4a16", "mlp.up_proj.weight_shape", lambda t: t + 1, "expected"),
    "no input scale": ("fp8-static", "mlp.up_proj.input_scale", None, "is missing"),
    "integers": ("fp8-channel", "mlp.up_proj.weight", lambda t: t.float().char(), "states fp8"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_refused_with_tensor_and_file(packed, tmp_path, what) -> None:
    name, end, change, message = DAMAGE[what]
    folder, tensor = tmp_path / "damaged", LAYER + end
    shutil.copytree(packed(name)[0], folder)
    file = folder / "model.safetensors"
    content = load_file(file)
    value = content.pop(tensor)
    if change is not None:
        content[tensor] = change(value).contiguous()
    save_file(content, file)
    with pytest.raises(ModelRefused, match=message) as caught:
        whole_runner(str(folder))
    assert caught.value.param == tensor
    assert str(file) in caught.value.message


def test_a_quantised_checkpoint_is_not_quantised_again(packed) -> None:
    with pytest.raises(ModelRefused, match="awq int4 g32") as caught:
        whole_runner(str(packed("awq")[0]), quantization="int8")
    assert caught.value.param == "quantization"


def test_the_fingerprint_says_the_precision(packed, plain) -> None:
    prints = [
        whole_runner(str(plain)).fingerprint,
        whole_runner(str(plain), quantization="int8").fingerprint,
        whole_runner(str(packed("awq")[0])).fingerprint,
    ]
    assert len({fingerprint.weights for fingerprint in prints}) == 3
    assert prints[0].differing_field(prints[1]) == "weights"


def test_a_family_has_the_precisions_of_one_model(packed, plain, tmp_path) -> None:
    other = save_tiny_llama(tmp_path, seed=1, **SIZES)
    half = tmp_path / "half"
    shutil.copytree(packed("awq")[0], half)
    content = load_file(half / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    content[embedding] = content[embedding].half()
    save_file(content, half / "model.safetensors")
    folders = [plain, packed("gptq-ordered")[0], half, Path(other)]
    prints = [whole_runner(str(folder), kv_family="tiny").fingerprint for folder in folders]
    assert prints[0] == prints[1] == prints[2]
    assert prints[0].differing_field(prints[3]) == "weights"
    assert prints[0].weights.startswith("family tiny ")


def stated(**changes: object) -> dict[str, object]:
    return {"quantization_config": changes}


REFUSED = {
    "bitsandbytes": (stated(quant_method="bitsandbytes", load_in_4bit=True), "--quantization"),
    "mxfp4": (stated(quant_method="mxfp4"), "llm-compressor"),
    "gguf": (stated(quant_method="gguf"), "safetensors"),
    "modelopt": (stated(quant_method="modelopt", quant_algo="NVFP4"), "llm-compressor"),
    "nvfp4-pack-quantized": (
        stated(
            quant_method="compressed-tensors",
            format="nvfp4-pack-quantized",
            config_groups={"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
        ),
        "llm-compressor",
    ),
    "awq gemv": (stated(quant_method="awq", bits=4, version="gemv"), "version gemm"),
    "gptq with 3 bits": (stated(quant_method="gptq", bits=3), "llm-compressor"),
    "gptq as marlin": (stated(quant_method="gptq", checkpoint_format="marlin"), "FORMAT.GPTQ"),
    "none": (stated(load_in_8bit=True), "llm-compressor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused_by_name_with_what_converts_them(name) -> None:
    raw, instead = REFUSED[name]
    with pytest.raises(ModelRefused, match=f"{name} is not served") as caught:
        parse_quantization(raw)
    assert instead in caught.value.message
    assert caught.value.param == "quantization_config.quant_method"


def test_a_format_stated_in_a_file_of_its_own_is_refused(plain, tmp_path) -> None:
    shutil.copytree(plain, tmp_path / "modelopt")
    (tmp_path / "modelopt" / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelRefused, match="modelopt is not served"):
        load_model_config(tmp_path / "modelopt")


def test_several_groups_name_their_modules(plain) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    raw = json.loads((plain / "config.json").read_text()) | stated(
        quant_method="compressed-tensors",
        format="mixed-precision",
        config_groups={
            "group_0": {"targets": ["Linear"], "weights": weights},
            "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "type": "float"}},
        },
    )
    form = parse_model_config(raw).quantization
    assert form is not None
    assert form.of("model.layers.3.mlp.down_proj").describe() == "fp8"
    assert form.of("model.layers.3.mlp.up_proj").describe() == "int4 g32"
    assert form.describe() == "compressed-tensors int4 g32 + fp8"


def test_targets_name_modules_by_pattern_name_and_end() -> None:
    module = "model.layers.0.self_attn.q_proj"
    for target in ("re:.*q_proj$", module, "q_proj", "self_attn.q_proj"):
        assert names_module(target, module)
    for target in ("re:q_proj", "proj", "model.layers.0", "k_proj"):
        assert not names_module(target, module)
