"""Mistral 7B to Small and Nemo."""

from engine.model.config import ModelConfig
from engine.model.families.defaults import parse_common, uniform_layers
from engine.model.reading import Raw, optional_positive
from engine.model.rope import parse_rope


def parse(raw: Raw) -> ModelConfig:
    """No biases; a window on all layers, or none (v0.1 has one)."""
    window = optional_positive(raw, "sliding_window")
    return parse_common(raw, layers=uniform_layers(raw, parse_rope(raw), window))
