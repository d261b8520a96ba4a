"""SmolLM3."""

from engine.model.config import LayerConfig, ModelConfig
from engine.model.families.defaults import parse_common
from engine.model.reading import Raw, positive, refused
from engine.model.rope import parse_rope


def parse(raw: Raw) -> ModelConfig:
    """Every fourth layer, or those that `no_rope_layers` marks with 0, encode no positions."""
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
