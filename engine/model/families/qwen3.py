"""Qwen 3, the dense models."""

from engine.model.config import ModelConfig, QkNorm
from engine.model.families.defaults import parse_common, windowed_tail
from engine.model.reading import Raw, positive


def parse(raw: Raw) -> ModelConfig:
    """Norms of each query and key head, and head_dim 128 whatever the hidden size."""
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
