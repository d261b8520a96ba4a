"""OLMo 2."""

from engine.model.config import ModelConfig, NormPlacement, QkNorm
from engine.model.families.defaults import parse_common
from engine.model.reading import Raw


def parse(raw: Raw) -> ModelConfig:
    """Norms after attention and MLP instead of before them; queries and keys normed over all
    heads together."""
    bias = bool(raw.get("attention_bias", False))
    return parse_common(
        raw, qkv_bias=bias, out_bias=bias, norms=NormPlacement.AFTER, qk_norm=QkNorm.ALL
    )
