"""Engine settings and config.json: what is served is parsed, the rest is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.model.config import ModelConfig, QkNorm
from engine.model.families import FAMILIES, load_model_config, parse_model_config
from engine.model.rope import RopeKind
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


def rope_of(config):
    """The rotation that all layers have."""
    (rope,) = {layer.rope for layer in config.layers}
    return rope


def test_defaults_follow_the_llama_family():
    config = parse_model_config(BASE)
    assert config.head_dim == 16
    assert config.group_size == 2
    assert rope_of(config).kind is RopeKind.DEFAULT
    assert rope_of(config).theta == 10000.0
    assert not any((config.tie_word_embeddings, config.qkv_bias, config.out_bias, config.mlp_bias))


def test_explicit_fields_win():
    raw = BASE | {
        "head_dim": 32,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    }
    config = parse_model_config(raw)
    assert (config.head_dim, config.rms_norm_eps, rope_of(config).theta) == (32, 1e-5, 5e5)
    assert config.tie_word_embeddings
    assert config.qkv_bias
    assert config.out_bias
    assert config.mlp_bias


def test_kv_heads_default_to_query_heads():
    raw = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert parse_model_config(raw).num_kv_heads == 4


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_both_spellings_of_the_rope_type_mean_the_same(spelling):
    raw = BASE | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {spelling: "llama3"}}
    rope = rope_of(parse_model_config(raw))
    assert rope.kind is RopeKind.LLAMA3
    assert (rope.theta, rope.factor, rope.original_max_position) == (5e5, 8.0, 1024)


def test_new_and_old_layout_of_rope_mean_the_same():
    old = BASE | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}}
    new = BASE | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}
    assert rope_of(parse_model_config(old)) == rope_of(parse_model_config(new))
    assert (
        rope_of(parse_model_config(old)).describe() == rope_of(parse_model_config(new)).describe()
    )


def test_different_rope_reads_differently():
    plain = rope_of(parse_model_config(BASE)).describe()
    scaled = parse_model_config(BASE | {"rope_scaling": LLAMA3 | {"type": "llama3"}})
    assert plain != rope_of(scaled).describe()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method"),
        ({"quantization_config": "gptq"}, "quantization_config"),
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "high_freq_factor": 1.0}}, "rope_scaling"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
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
        parse_model_config(BASE | changes)
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
    config = load_model_config(tmp_path)
    assert (config.vocab_size, config.hidden_size) == (99, 32)
    assert (rope_of(config).kind, rope_of(config).theta) == (RopeKind.LLAMA3, 7e4)


#: Fields that a config.json must state.
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
SIZES |= {"num_attention_heads", "architectures", "hidden_size_per_layer_input"}
CLASSES = {"Gemma3ForCausalLM": "Gemma3TextConfig", "Gemma4ForCausalLM": "Gemma4TextConfig"}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_unsaid_means_what_transformers_takes(name):
    import transformers

    family = getattr(transformers, CLASSES.get(name, name.replace("ForCausalLM", "Config")))
    whole = family(hidden_size_per_layer_input=0).to_dict() | {"architectures": [name]}
    expected = parse_model_config(whole)
    for field in whole.keys() - SIZES:
        said = {key: value for key, value in whole.items() if key != field}
        assert parse_model_config(said) == expected, field


def test_two_statements_of_the_rotation_that_differ_are_refused():
    """transformers would take the older one, and leave out what only the newer one says."""
    new = {"rope_type": "default", "rope_theta": 1e6}
    both = parsed("Qwen3ForCausalLM", rope_parameters=new, rope_scaling={"type": "default"})
    assert both == parsed("Qwen3ForCausalLM", rope_parameters=new)
    yarn = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(ModelRefused) as caught:
        parsed("Qwen3ForCausalLM", rope_parameters=new, rope_scaling=yarn)
    assert caught.value.param == "rope_scaling"


@pytest.mark.parametrize("text", [None, "{", "[1]", "\xff"])
def test_an_unreadable_config_names_the_file(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelRefused) as caught:
        load_model_config(tmp_path)
    assert caught.value.param == str(path)


def test_a_readable_config_loads(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert load_model_config(tmp_path).num_layers == 2


def test_an_unknown_architecture_names_the_nearest_that_is_served():
    with pytest.raises(ModelRefused, match="nearest is Qwen3ForCausalLM"):
        parse_model_config(BASE | {"architectures": ["Qwen3MoeForCausalLM"]})


def parsed(architecture, **changes):
    return parse_model_config(BASE | {"architectures": [architecture]} | changes)


def test_biases_that_no_field_names():
    qwen2, qwen3 = parsed("Qwen2ForCausalLM"), parsed("Qwen3ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.mlp_bias) == (True, False, False)
    assert not qwen3.qkv_bias
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, QkNorm.HEAD)


def windows(config):
    return [layer.window for layer in config.layers]


#: Fields of a configuration that change no KV, or that the fingerprint names in fields of its own.
APART = {
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings", "fused_weights"),
    *("final_softcap", "logit_scale", "num_kv_heads", "head_dim", "layers"),
    "quantization",
}


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_a_fingerprint_names_every_setting_that_changes_kv(name):
    """Weights are equal and config.json differs: a revision that corrects a scale, for example."""
    model = parse_model_config(BASE)
    others = [model, *(parsed(a, hidden_size_per_layer_input=0) for a in FAMILIES)]
    values = [getattr(other, name) for other in others] + [0.5, True]
    other = next(value for value in values if value != getattr(model, name))
    assert (replace(model, **{name: other}).describe() == model.describe()) == (name in APART)


def test_windows_by_family():
    many = {"num_hidden_layers": 7}
    assert windows(parsed("MistralForCausalLM", sliding_window=None)) == [None, None]
    assert windows(parsed("MistralForCausalLM", sliding_window=64)) == [64, 64]
    unused = parsed("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=False)
    assert windows(unused) == [None, None]
    tail = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5}
    assert windows(parsed("Qwen2ForCausalLM", **many, **tail)) == [None] * 5 + [64] * 2
    assert windows(parsed("Gemma2ForCausalLM", **many)) == [4096, None] * 3 + [4096]
    gemma3 = parsed("Gemma3ForCausalLM", **many, sliding_window=512)
    assert windows(gemma3) == [512] * 5 + [None, 512]


def test_gemma_3_has_two_rotations_in_both_spellings():
    old = parsed("Gemma3ForCausalLM", rope_local_base_freq=1e4, rope_theta=1e6)
    new = parsed(
        "Gemma3ForCausalLM",
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    )
    assert old.layers == new.layers
    six = parsed("Gemma3ForCausalLM", num_hidden_layers=6)
    assert [layer.rope.theta for layer in six.layers] == [1e4] * 5 + [1e6]


def test_smollm3_leaves_positions_out_of_every_fourth_layer():
    layers = parsed("SmolLM3ForCausalLM", num_hidden_layers=8).layers
    assert [layer.rope is None for layer in layers] == ([False] * 3 + [True]) * 2


def test_longrope_is_fixed_by_the_context_of_the_deployment():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    scaling = {"type": "longrope", "original_max_position_embeddings": 1024} | factors
    config = parsed("Phi3ForCausalLM", rope_scaling=scaling)
    short, long = (config.describe_positions(length) for length in (1024, 1025))
    assert short != long
    assert long == config.describe_positions(4096)


def test_contexts_that_scaling_extends():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert parsed("Qwen2ForCausalLM", rope_scaling=yarn).max_position_embeddings == 16384
    dynamic = {"type": "dynamic", "factor": 2.0}
    assert parsed("LlamaForCausalLM", rope_scaling=dynamic).max_position_embeddings == 8192


GEMMA4 = {"hidden_size_per_layer_input": 0}


@pytest.mark.parametrize(
    ("architecture", "changes", "field"),
    [
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "rope_scaling"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope_scaling",
        ),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("Gemma4ForCausalLM", {}, "hidden_size_per_layer_input"),
        ("Gemma4ForCausalLM", GEMMA4 | {"enable_moe_block": True}, "enable_moe_block"),
        ("Gemma4ForCausalLM", GEMMA4 | {"per_layer_config": {"0": {}}}, "per_layer_config"),
        ("Gemma4ForCausalLM", GEMMA4 | {"per_layer_config": {"5": 3}}, "per_layer_config"),
        ("Gemma4ForCausalLM", GEMMA4 | {"num_hidden_layers": 6, "global_head_dim": 33}, "head_dim"),
        ("MistralForCausalLM", {"sliding_window": -1}, "sliding_window"),
    ],
)
def test_what_a_family_cannot_have_is_refused_by_field(architecture, changes, field):
    with pytest.raises(ModelRefused) as caught:
        parsed(architecture, **changes)
    assert caught.value.param == field


def test_gemma_4_states_the_kv_of_its_layers_in_two_ways():
    """As published, and as transformers writes it."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    base = GEMMA4 | heads | {"num_hidden_layers": 6, "attention_k_eq_v": True}
    published = base | {"num_global_key_value_heads": 2, "global_head_dim": 32}
    own = {"head_dim": 32, "num_key_value_heads": 2}
    model = parsed("Gemma4ForCausalLM", **published)
    assert model == parsed("Gemma4ForCausalLM", **base, per_layer_config={"5": own})
    assert model == parsed("Gemma4ForCausalLM", **base, per_layer_config={"05": own})
    alike = parsed("Gemma4ForCausalLM", **base, per_layer_config={"5": {"num_key_value_heads": 2}})
    assert alike.kv_shapes[5] == (2, 16)
    assert model.kv_shapes == ((8, 16),) * 5 + ((2, 32),)
    assert [layer.values_are_keys for layer in model.layers] == [False] * 5 + [True]
    assert "layers=[5]" in model.describe_positions(64)
