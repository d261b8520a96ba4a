"""IBM Granite 3.x, the dense models."""

from engine.model.config import ModelConfig
from engine.model.families.defaults import parse_common
from engine.model.reading import Raw, number


def parse(raw: Raw) -> ModelConfig:
    """Llama with four multipliers."""
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
