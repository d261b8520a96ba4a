"""Served architectures: what the config.json of each family says and what it leaves unsaid.

`parse_common` reads what all families share; the function of a family states the rest. Each raises
ModelRefused naming the field.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused
from engine.kernels.activation import Activation
from engine.model.config import LayerConfig, ModelConfig, NormPlacement, QkNorm
from engine.model.formats.stated import parse_quantization
from engine.model.reading import Raw, number, optional_number, optional_positive, positive, refused
from engine.model.rope import RopeConfig, RopeKind, parse_rope

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def parse_common(
    raw: Raw, *, layers: tuple[LayerConfig, ...] | None = None, **family: Any
) -> ModelConfig:
    """A decoder as Llama has it, where `family` does not say otherwise (ModelConfig's fields).

    Raises ModelRefused naming the field.
    """
    heads = positive(raw, "num_attention_heads")
    kv_heads = positive(raw, "num_key_value_heads", heads)
    hidden = positive(raw, "hidden_size")
    head_dim = positive(raw, "head_dim", hidden // heads)
    if layers is None:
        layers = uniform_layers(raw, parse_rope(raw))
    for layer in set(layers):
        _check_layer(layer, heads, layer.num_kv_heads or kv_heads, layer.head_dim or head_dim)
    stated = positive(raw, "max_position_embeddings", 2048)
    fields: dict[str, Any] = {
        "architecture": raw["architectures"][0],
        "hidden_size": hidden,
        "intermediate_size": positive(raw, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": positive(raw, "vocab_size"),
        "max_position_embeddings": max(
            (layer.rope.max_positions(stated) for layer in layers if layer.rope), default=stated
        ),
        "rms_norm_eps": number(raw, "rms_norm_eps", 1e-6),
        "layers": layers,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": parse_activation(raw, "hidden_act"),
        "attention_scale": head_dim**-0.5,
    }
    return ModelConfig(**fields | family)


def parse_activation(raw: Raw, field: str, default: str = "silu") -> Activation:
    """The gate of the MLP, by the name that `field` has."""
    name = raw.get(field) or default
    if name not in _ACTIVATIONS:
        raise refused(field, f"{name!r} is not served (served: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]


def uniform_layers(
    raw: Raw, rope: RopeConfig | None, window: int | None = None
) -> tuple[LayerConfig, ...]:
    """Layers that are all alike."""
    return (LayerConfig(rope=rope, window=window),) * positive(raw, "num_hidden_layers")


def layer_types(raw: Raw, default: list[str]) -> list[str]:
    """`layer_types`, or what older files left to the code."""
    types = raw.get("layer_types") or default
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or len(types) != len(default) or not set(types) <= known:
        raise refused("layer_types", f"expected {len(default)} of {sorted(known)}, got {types!r}")
    return types


def alternating(num_layers: int, period: int) -> list[str]:
    """Layer types where each `period`-th layer attends to everything."""
    return [
        "sliding_attention" if (index + 1) % period else "full_attention"
        for index in range(num_layers)
    ]


def windowed_tail(raw: Raw) -> tuple[LayerConfig, ...]:
    """Qwen's layers: with `use_sliding_window` those from `max_window_layers` on have a window."""
    count, rope = positive(raw, "num_hidden_layers"), parse_rope(raw)
    window = optional_positive(raw, "sliding_window") if raw.get("use_sliding_window") else None
    if window is None:
        return uniform_layers(raw, rope)
    first = int(number(raw, "max_window_layers", 28))
    types = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    return tuple(
        LayerConfig(rope=rope, window=None if kind == "full_attention" else window)
        for kind in layer_types(raw, types)
    )


def _check_layer(layer: LayerConfig, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise refused("num_key_value_heads", f"{kv_heads} does not divide the {heads} query heads")
    if head_dim % 2:
        raise refused("head_dim", f"{head_dim} is odd: rotary embedding needs pairs")
    if layer.rope is not None:
        _check_rope(layer.rope, head_dim)


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    dim = rope.rotary_dim(head_dim)
    if dim < 2 or dim % 2:
        raise refused("partial_rotary_factor", f"turns {dim} of {head_dim} dimensions of a head")
    if rope.kind is RopeKind.LONGROPE:
        for name in ("short_factor", "long_factor"):
            if len(getattr(rope, name)) != dim // 2:
                raise refused("rope_scaling", f"{name} must have {dim // 2} numbers")


def llama(raw: Raw) -> ModelConfig:
    """Llama 2 to 3.x, and what is published as Llama: biases only where config.json says so."""
    bias = bool(raw.get("attention_bias", False))
    return parse_common(
        raw, qkv_bias=bias, out_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False))
    )


def mistral(raw: Raw) -> ModelConfig:
    """Mistral 7B to Small and Nemo: no biases; a window on all layers, or none (v0.1 has one)."""
    window = optional_positive(raw, "sliding_window")
    return parse_common(raw, layers=uniform_layers(raw, parse_rope(raw), window))


def qwen2(raw: Raw) -> ModelConfig:
    """Qwen 2 and 2.5: q, k and v have biases, the output projection has none, which no field of
    config.json says."""
    return parse_common(raw, layers=windowed_tail(raw), qkv_bias=True)


def qwen3(raw: Raw) -> ModelConfig:
    """Qwen 3, dense: norms of each query and key head, head_dim 128 whatever the hidden size."""
    bias = bool(raw.get("attention_bias", False))
    return parse_common(
        raw,
        layers=windowed_tail(raw),
        head_dim=positive(raw, "head_dim", 128),
        attention_scale=positive(raw, "head_dim", 128) ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QkNorm.HEAD,
    )


def gemma2(raw: Raw) -> ModelConfig:
    """Gemma 2: four norms a layer, softcaps, a window on every other layer, scaled embeddings."""
    rope, window = parse_rope(raw), positive(raw, "sliding_window", 4096)
    types = layer_types(raw, alternating(positive(raw, "num_hidden_layers"), 2))
    return parse_common(
        raw,
        layers=tuple(
            LayerConfig(rope=rope, window=window if kind == "sliding_attention" else None)
            for kind in types
        ),
        attention_softcap=optional_number(raw, "attn_logit_softcapping"),
        final_softcap=optional_number(raw, "final_logit_softcapping"),
        **_gemma(raw),
    )


def _gemma(raw: Raw) -> dict[str, object]:
    head_dim, bias = positive(raw, "head_dim", 256), bool(raw.get("attention_bias", False))
    return {
        "head_dim": head_dim,
        "attention_scale": number(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        "activation": parse_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        "norms": NormPlacement.AROUND,
        "norm_offset": 1.0,
        "embedding_scale": positive(raw, "hidden_size") ** 0.5,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "qkv_bias": bias,
        "out_bias": bias,
    }


def gemma3(raw: Raw) -> ModelConfig:
    """Gemma 3, text: five layers with a window to one without, each kind with its own rotation;
    normed heads."""
    if raw.get("use_bidirectional_attention"):
        raise refused("use_bidirectional_attention", "only causal attention is served")
    window = positive(raw, "sliding_window", 4096)
    period = positive(raw, "sliding_window_pattern", positive(raw, "_sliding_window_pattern", 6))
    types = layer_types(raw, alternating(positive(raw, "num_hidden_layers"), period))
    kinds = {
        "full_attention": LayerConfig(rope=_gemma3_rope(raw, "full_attention", 1e6)),
        "sliding_attention": LayerConfig(
            rope=_gemma3_rope(raw, "sliding_attention", 1e4), window=window
        ),
    }
    return parse_common(
        raw,
        layers=tuple(kinds[kind] for kind in types),
        qk_norm=QkNorm.HEAD,
        final_softcap=optional_number(raw, "final_logit_softcapping"),
        **_gemma(raw),
    )


def _gemma3_rope(raw: Raw, kind: str, theta: float) -> RopeConfig:
    """The rotation of one kind of layer: `rope_parameters` by kind, or the older
    `rope_local_base_freq` for those with a window, which are never scaled."""
    if raw.get("rope_parameters"):
        return parse_rope(raw, kind)
    if kind == "sliding_attention":
        return RopeConfig(theta=number(raw, "rope_local_base_freq", theta))
    return parse_rope({"rope_theta": theta, **raw})


def gemma4(raw: Raw) -> ModelConfig:
    """Gemma 4, dense text: layers that attend to everything have fewer and larger KV heads, whose
    values are the keys' products; values are normed, too; each layer scales its output."""
    for field in _GEMMA4_LEFT_OUT:
        if raw.get(field):
            raise refused(field, f"{raw[field]!r} is not served for Gemma 4")
    if raw.get("use_bidirectional_attention") == "all":
        raise refused("use_bidirectional_attention", "only causal attention is served")
    types = layer_types(raw, alternating(positive(raw, "num_hidden_layers"), 6))
    values_are_keys = bool(raw.get("attention_k_eq_v", False))
    own = _gemma4_full(raw, types, values_are_keys)
    turned = {**raw, "rope_parameters": raw.get("rope_parameters") or _GEMMA4_ROPE}
    kinds = {
        "full_attention": LayerConfig(
            rope=parse_rope(turned, "full_attention"), values_are_keys=values_are_keys, **own
        ),
        "sliding_attention": LayerConfig(
            rope=parse_rope(turned, "sliding_attention"),
            window=positive(raw, "sliding_window", 512),
        ),
    }
    return parse_common(
        raw,
        layers=tuple(kinds[kind] for kind in types),
        qk_norm=QkNorm.HEAD,
        normed_values=True,
        scaled_layers=True,
        final_softcap=optional_number(raw, "final_logit_softcapping"),
        **_gemma(raw) | {"attention_scale": 1.0, "norm_offset": 0.0},
    )


#: Parts that some models of the family have.
_GEMMA4_LEFT_OUT = (
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "enable_moe_block",
    "use_double_wide_mlp",
)
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def _gemma4_full(raw: Raw, types: list[str], values_are_keys: bool) -> dict[str, int]:
    """KV heads and head size of layers that attend to everything: as published, or by layer, as
    transformers writes them."""
    stated = raw.get("per_layer_config") or {}
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    try:
        by_layer = {int(i): dict(own) for i, own in stated.items()}  # "05" of ten layers or more
    except (AttributeError, TypeError, ValueError):
        raise refused("per_layer_config", f"expected an object, by layer, got {stated!r}") from None
    if not by_layer.keys() <= set(full):
        raise refused("per_layer_config", "only layers of full_attention may have their own")
    values = [by_layer.get(index, {}) for index in full]
    if any(value != values[0] for value in values):
        raise refused("per_layer_config", "layers of full_attention differ")
    if values and values[0]:
        said = values[0]
        heads = optional_positive(said, "num_key_value_heads")
        dim = positive(said, "head_dim", positive(raw, "head_dim", 256))
    else:
        heads = optional_positive(raw, "num_global_key_value_heads") if values_are_keys else None
        dim = positive(raw, "global_head_dim", 512)
    return {"num_kv_heads": heads or positive(raw, "num_key_value_heads"), "head_dim": dim}


def phi3(raw: Raw) -> ModelConfig:
    """Phi-3, Phi-3.5 and Phi-4 (mini and 14B): fused projections in the checkpoint; longrope, and
    rotation of a part of each head."""
    window = optional_positive(raw, "sliding_window")
    return parse_common(
        raw, layers=uniform_layers(raw, parse_rope(raw), window), fused_weights=True
    )


def smollm3(raw: Raw) -> ModelConfig:
    """SmolLM3: every fourth layer, or those that `no_rope_layers` marks with 0, encode no
    positions."""
    count, rope = positive(raw, "num_hidden_layers"), parse_rope(raw)
    if raw.get("use_sliding_window"):
        raise refused("use_sliding_window", "only false is served for SmolLM3")
    interval = positive(raw, "no_rope_layer_interval", 4)
    turns = raw.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    if not isinstance(turns, list) or len(turns) != count:
        raise refused("no_rope_layers", f"expected {count} numbers, got {turns!r}")
    bias = bool(raw.get("attention_bias", False))
    return parse_common(
        raw,
        layers=tuple(LayerConfig(rope=rope if turn else None) for turn in turns),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def granite(raw: Raw) -> ModelConfig:
    """IBM Granite 3.x, dense: Llama with four multipliers."""
    bias = bool(raw.get("attention_bias", False))
    return parse_common(
        raw,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        attention_scale=number(raw, "attention_multiplier", 1.0),
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(raw, "logits_scaling", 1.0),
    )


def olmo2(raw: Raw) -> ModelConfig:
    """OLMo 2: norms after attention and MLP instead of before them; queries and keys normed over
    all heads together."""
    bias = bool(raw.get("attention_bias", False))
    return parse_common(
        raw, qkv_bias=bias, out_bias=bias, norms=NormPlacement.AFTER, qk_norm=QkNorm.ALL
    )


FAMILIES = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Phi3ForCausalLM": phi3,
    "SmolLM3ForCausalLM": smollm3,
    "GraniteForCausalLM": granite,
    "Olmo2ForCausalLM": olmo2,
}


#: What a config.json leaves unsaid where transformers takes something else than for Llama.
_UNSAID: dict[str, Raw] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096}
    | {"max_position_embeddings": 131072},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768},
    "Gemma2ForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 8192}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 131072},
    "Gemma4ForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 131072}
    | {"hidden_size_per_layer_input": 256},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    | {"original_max_position_embeddings": 4096},
    "SmolLM3ForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 32768}
    | {"rope_theta": 2e6},
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
}


def load_model_config(model_path: str | Path) -> ModelConfig:
    """Parse `model_path`/config.json. Raises ModelRefused naming the file or field."""
    path = Path(model_path) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelRefused(f"{path} does not exist", param=str(path)) from error
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}", param=str(path)) from error
    if not isinstance(raw, dict):
        raise ModelRefused(f"{path} is not a JSON object", param=str(path))
    if path.with_name("hf_quant_config.json").exists() and not raw.get("quantization_config"):
        raw["quantization_config"] = {"quant_method": "modelopt"}  # stated in a file of its own
    return parse_model_config(raw)


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Parse a config.json object. Raises ModelRefused naming the field that is not served."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in FAMILIES:
        nearest = difflib.get_close_matches(str(name), FAMILIES, n=1, cutoff=0.0)[0]
        raise refused(
            "architectures",
            f"{names} is not served; nearest is {nearest} (served: {', '.join(FAMILIES)})",
        )
    said = {**_UNSAID.get(name, {}), **raw}
    return replace(FAMILIES[name](said), quantization=parse_quantization(raw))
