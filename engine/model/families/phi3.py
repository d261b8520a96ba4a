"""Phi-3, Phi-3.5 and Phi-4 (mini and 14B)."""

from engine.model.config import ModelConfig
from engine.model.families.defaults import parse_common, uniform_layers
from engine.model.reading import Raw, optional_positive
from engine.model.rope import parse_rope


def parse(raw: Raw) -> ModelConfig:
    """Fused projections in the checkpoint; longrope, and rotation of a part of each head."""
    window = optional_positive(raw, "sliding_window")
    return parse_common(
        raw, layers=uniform_layers(raw, parse_rope(raw), window), fused_weights=True
    )
