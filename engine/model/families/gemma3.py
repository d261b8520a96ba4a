"""Gemma 3, the text models."""

from engine.model.config import LayerConfig, ModelConfig, QkNorm
from engine.model.families.defaults import alternating, layer_types, parse_common
from engine.model.families.gemma2 import gemma
from engine.model.reading import Raw, number, positive, refused
from engine.model.rope import RopeConfig, parse_rope


def parse(raw: Raw) -> ModelConfig:
    """Five layers with a window to one without, each kind with its own rotation; normed heads."""
    if raw.get("use_bidirectional_attention"):
        raise refused("use_bidirectional_attention", "only causal attention is served")
    window = positive(raw, "sliding_window", 4096)
    period = positive(raw, "sliding_window_pattern", positive(raw, "_sliding_window_pattern", 6))
    types = layer_types(raw, alternating(positive(raw, "num_hidden_layers"), period))
    kinds = {
        "full_attention": LayerConfig(rope=_rope(raw, "full_attention", 1e6)),
        "sliding_attention": LayerConfig(rope=_rope(raw, "sliding_attention", 1e4), window=window),
    }
    return parse_common(
        raw,
        layers=tuple(kinds[kind] for kind in types),
        qk_norm=QkNorm.HEAD,
        **gemma(raw),
    )


def _rope(raw: Raw, kind: str, theta: float) -> RopeConfig:
    """The rotation of one kind of layer: `rope_parameters` by kind, or the older
    `rope_local_base_freq` for those with a window, which are never scaled."""
    if raw.get("rope_parameters"):
        return parse_rope(raw, kind)
    if kind == "sliding_attention":
        return RopeConfig(theta=number(raw, "rope_local_base_freq", theta))
    return parse_rope({"rope_theta": theta, **raw})
