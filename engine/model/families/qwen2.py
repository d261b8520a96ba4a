"""Qwen 2 and 2.5."""

from engine.model.config import ModelConfig
from engine.model.families.defaults import parse_common, windowed_tail
from engine.model.reading import Raw


def parse(raw: Raw) -> ModelConfig:
    """q, k and v have biases, the output projection has none: no field of config.json says so."""
    return parse_common(raw, layers=windowed_tail(raw), qkv_bias=True)
