"""What the config.json of all families has in common."""

from __future__ import annotations

from typing import Any

from engine.kernels.activation import Activation
from engine.model.config import LayerConfig, ModelConfig
from engine.model.reading import Raw, number, optional_positive, positive, refused
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
    if heads % kv_heads:
        raise refused("num_key_value_heads", f"{kv_heads} does not divide the {heads} query heads")
    if head_dim % 2:
        raise refused("head_dim", f"{head_dim} is odd: rotary embedding needs pairs")
    if layers is None:
        layers = uniform_layers(raw, parse_rope(raw))
    for rope in {layer.rope for layer in layers if layer.rope is not None}:
        _check_rope(rope, head_dim)
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


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    dim = rope.rotary_dim(head_dim)
    if dim < 2 or dim % 2:
        raise refused("partial_rotary_factor", f"turns {dim} of {head_dim} dimensions of a head")
    if rope.kind is RopeKind.LONGROPE:
        for name in ("short_factor", "long_factor"):
            if len(getattr(rope, name)) != dim // 2:
                raise refused("rope_scaling", f"{name} must have {dim // 2} numbers")
