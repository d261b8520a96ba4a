"""Gemma 2."""

from engine.model.config import LayerConfig, ModelConfig, NormPlacement
from engine.model.families.defaults import (
    alternating,
    layer_types,
    parse_activation,
    parse_common,
)
from engine.model.reading import Raw, number, optional_number, positive
from engine.model.rope import parse_rope


def parse(raw: Raw) -> ModelConfig:
    """Four norms a layer, softcaps, a window on every other layer, scaled embeddings."""
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
        **gemma(raw),
    )


def gemma(raw: Raw) -> dict[str, object]:
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
