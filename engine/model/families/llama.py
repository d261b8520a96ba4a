"""Llama 2 to 3.x, and the many models that are published as Llama."""

from engine.model.config import ModelConfig
from engine.model.families.defaults import parse_common
from engine.model.reading import Raw


def parse(raw: Raw) -> ModelConfig:
    """Biases only where config.json says so."""
    bias = bool(raw.get("attention_bias", False))
    return parse_common(
        raw, qkv_bias=bias, out_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False))
    )
