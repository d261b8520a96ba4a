"""Parses a model's config.json; refuses by name what the engine does not compute."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused

ARCHITECTURES = ("LlamaForCausalLM",)
_ACTIVATIONS = ("silu", "swish")
_DEFAULT_THETA = 10000.0


class RopeKind(StrEnum):
    """Derivation of the rotary frequencies."""

    DEFAULT = "default"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. The last four fields apply to LLAMA3 only."""

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0

    def describe(self) -> str:
        """Equal texts for equal embeddings, for fingerprints."""
        if self.kind is RopeKind.DEFAULT:
            return f"default theta={self.theta!r}"
        return (
            f"llama3 theta={self.theta!r} factor={self.factor!r} low={self.low_freq_factor!r} "
            f"high={self.high_freq_factor!r} original={self.original_max_position}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder. Head counts are those of the whole model, not of a rank."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    def describe(self) -> str:
        """What determines KV besides the weights, for fingerprints."""
        return (
            f"{self.architecture} hidden={self.hidden_size} heads={self.num_heads} "
            f"eps={self.rms_norm_eps!r}"
        )

    @staticmethod
    def load(model_path: str | Path) -> ModelConfig:
        """Parse `model_path`/config.json. Raises ModelRefused naming the file or field."""
        path = Path(model_path) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelRefused(f"{path} does not exist", param=str(path)) from error
        except (OSError, ValueError) as error:
            raise ModelRefused(f"{path} cannot be read: {error}", param=str(path)) from error
        if not isinstance(raw, dict):
            raise ModelRefused(f"{path} is not a JSON object", param=str(path))
        return ModelConfig.from_dict(raw)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> ModelConfig:
        """Parse a config.json object. Raises ModelRefused naming the field that is not served."""
        _refuse_unserved(raw)
        heads = _positive(raw, "num_attention_heads")
        kv_heads = _positive(raw, "num_key_value_heads", heads)
        hidden = _positive(raw, "hidden_size")
        head_dim = _positive(raw, "head_dim", hidden // heads)
        if heads % kv_heads:
            raise _refused(
                "num_key_value_heads", f"{kv_heads} does not divide the {heads} query heads"
            )
        if head_dim % 2:
            raise _refused("head_dim", f"{head_dim} is odd: rotary embedding needs pairs")
        max_positions = _positive(raw, "max_position_embeddings", 2048)
        return ModelConfig(
            architecture=raw["architectures"][0],
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_positive(raw, "vocab_size"),
            max_position_embeddings=max_positions,
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope=_parse_rope(raw, max_positions),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
        )


def _refused(field: str, why: str) -> ModelRefused:
    return ModelRefused(f"config.json: {field}: {why}", param=field)


def _refuse_unserved(raw: dict[str, Any]) -> None:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or names[0] not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise _refused("architectures", f"{names} is not served (served: {served})")
    activation = raw.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise _refused("hidden_act", f"{activation!r} is not served (served: silu)")
    if raw.get("quantization_config"):
        raise _refused("quantization_config", "quantised weights are not served")


def _number(raw: dict[str, Any], field: str, default: float | None = None) -> float:
    value = raw.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refused(field, f"expected a number, got {value!r}")
    return float(value)


def _positive(raw: dict[str, Any], field: str, default: int | None = None) -> int:
    value = _number(raw, field, default)
    if value < 1 or value != int(value):
        raise _refused(field, f"expected a positive whole number, got {value!r}")
    return int(value)


def _parse_rope(raw: dict[str, Any], max_positions: int) -> RopeConfig:
    """Both formats: rope_theta with rope_scaling {type | rope_type}, and rope_parameters."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    where = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    if not isinstance(scaling, dict):
        raise _refused(where, f"expected an object, got {scaling!r}")
    theta = _number(scaling, "rope_theta", _number(raw, "rope_theta", _DEFAULT_THETA))
    name = scaling.get("rope_type", scaling.get("type", "default"))
    if name not in list(RopeKind):
        served = ", ".join(RopeKind)
        raise _refused(where, f"rope type {name!r} is not served (served: {served})")
    if _number(scaling, "partial_rotary_factor", _number(raw, "partial_rotary_factor", 1.0)) != 1.0:
        raise _refused("partial_rotary_factor", "only 1.0 is served")
    if name == RopeKind.DEFAULT:
        return RopeConfig(theta=theta)
    low = _number(scaling, "low_freq_factor")
    high = _number(scaling, "high_freq_factor")
    factor = _number(scaling, "factor")
    if not (factor >= 1.0 and 0.0 < low < high):
        raise _refused(where, "needs factor >= 1 and 0 < low_freq_factor < high_freq_factor")
    return RopeConfig(
        theta=theta,
        kind=RopeKind.LLAMA3,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_positive(scaling, "original_max_position_embeddings", max_positions),
    )
