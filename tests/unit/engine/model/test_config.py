"""Engine settings and config.json: what is served is parsed, the rest is refused by name."""

from __future__ import annotations

import json

import pytest

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.model.config import ModelConfig, RopeKind
from protocol.errors import InvalidRequest

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_path", ""),
        ("dtype", "int3"),
        ("block_size", 0),
        ("tp_size", 0),
        ("num_blocks", -1),
        ("kv_memory_bytes", 0),
        ("max_model_len", 0),
        ("num_threads", 0),
        ("spare_bytes", -1),
        ("max_step_tokens", 0),
        ("max_running", 0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest) as caught:
        EngineConfig(**({"model_path": "m"} | {field: value}))
    assert caught.value.param == field


def test_defaults_follow_the_llama_family():
    config = ModelConfig.from_dict(BASE)
    assert config.head_dim == 16
    assert config.group_size == 2
    assert config.rope.kind is RopeKind.DEFAULT
    assert config.rope.theta == 10000.0
    assert not any((config.tie_word_embeddings, config.attention_bias, config.mlp_bias))


def test_explicit_fields_win():
    raw = BASE | {
        "head_dim": 32,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    }
    config = ModelConfig.from_dict(raw)
    assert (config.head_dim, config.rms_norm_eps, config.rope.theta) == (32, 1e-5, 5e5)
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert config.mlp_bias


def test_kv_heads_default_to_query_heads():
    raw = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_dict(raw).num_kv_heads == 4


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_both_spellings_of_the_rope_type_mean_the_same(spelling):
    raw = BASE | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {spelling: "llama3"}}
    rope = ModelConfig.from_dict(raw).rope
    assert rope.kind is RopeKind.LLAMA3
    assert (rope.theta, rope.factor, rope.original_max_position) == (5e5, 8.0, 1024)


def test_new_and_old_layout_of_rope_mean_the_same():
    old = BASE | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}}
    new = BASE | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}
    assert ModelConfig.from_dict(old).rope == ModelConfig.from_dict(new).rope
    assert ModelConfig.from_dict(old).rope.describe() == ModelConfig.from_dict(new).rope.describe()


def test_different_rope_reads_differently():
    plain = ModelConfig.from_dict(BASE).rope.describe()
    scaled = ModelConfig.from_dict(BASE | {"rope_scaling": LLAMA3 | {"type": "llama3"}}).rope
    assert plain != scaled.describe()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "high_freq_factor": 1.0}}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 6.5}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
    ],
)
def test_what_cannot_be_served_is_refused_by_field(changes, field):
    with pytest.raises(ModelRefused) as caught:
        ModelConfig.from_dict(BASE | changes)
    assert caught.value.param == field
    assert field in caught.value.message


def test_what_transformers_writes_is_read(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_type": "llama3", "rope_theta": 7e4} | LLAMA3,
    ).save_pretrained(tmp_path)
    config = ModelConfig.load(tmp_path)
    assert (config.vocab_size, config.hidden_size) == (99, 32)
    assert (config.rope.kind, config.rope.theta) == (RopeKind.LLAMA3, 7e4)


@pytest.mark.parametrize("text", [None, "{", "[1]", "\xff"])
def test_an_unreadable_config_names_the_file(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelRefused) as caught:
        ModelConfig.load(tmp_path)
    assert caught.value.param == str(path)


def test_a_readable_config_loads(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert ModelConfig.load(tmp_path).num_layers == 2
