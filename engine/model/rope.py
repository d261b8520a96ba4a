"""Rotary position embedding: what config.json says of it, and the frequencies that follow.

Kinds and their sources: default (Su et al., 2021), linear (Chen et al., 2023), dynamic (NTK-aware
scaling, as transformers computes it), yarn (Peng et al., 2023), longrope (Ding et al., 2024),
llama3 (Llama 3.1), proportional (Gemma 4: the slower planes of a head do not turn). Those that
depend on a sequence's length in transformers (dynamic, longrope) are fixed once for a deployment by
its context, so that cached KV never depends on a request's length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from engine.model.reading import Raw, number, positive, refused

_DEFAULT_THETA = 10000.0


class RopeKind(StrEnum):
    """How rotary frequencies are derived from theta."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of some layers.

    partial: the share of a head's dimensions that turn. original_max_position: the context of
    pretraining, which scaling extends. scale: multiplies cos and sin. The factors of longrope have
    one number a plane.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    partial: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    scale: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that turn, the first ones; of a proportional rope all, some of them
        by nothing."""
        return head_dim if self.kind is RopeKind.PROPORTIONAL else int(head_dim * self.partial)

    def max_positions(self, stated: int) -> int:
        """The longest context: `stated` is max_position_embeddings, which some kinds extend."""
        if self.kind is RopeKind.DYNAMIC:
            return int(self.factor * stated)
        if self.kind is RopeKind.YARN:
            return max(stated, int(self.factor * self.original_max_position))
        return stated

    def fixed(self, max_model_len: int, head_dim: int) -> RopeConfig:
        """The same for a deployment with contexts up to `max_model_len` tokens."""
        original = self.original_max_position
        if self.kind is RopeKind.LONGROPE:
            chosen = self.long_factor if max_model_len > original else self.short_factor
            return replace(self, short_factor=chosen, long_factor=())
        if self.kind is RopeKind.DYNAMIC:
            stretch = self.factor * max(1.0, max_model_len / original) - (self.factor - 1.0)
            dim = self.rotary_dim(head_dim)
            theta = self.theta * stretch ** (dim / (dim - 2))
            return RopeConfig(theta=theta, partial=self.partial)
        return self

    def describe(self) -> str:
        """A text, equal for two fixed configurations exactly when positions mean the same."""
        stated = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return " ".join(
            f"{name}={value!s}" if isinstance(value, StrEnum) else f"{name}={value!r}"
            for name, value, default in stated
            if value != default
        )


# --- config.json ----------------------------------------------------------------------------------


def parse_rope(raw: Raw, layer_type: str = "") -> RopeConfig:
    """Rotary embedding of a config.json, of one of its layer types where these differ.

    Reads both spellings: `rope_theta` and `rope_scaling` {`type` or `rope_type`}, and
    `rope_parameters`. Raises ModelRefused naming the field.
    """
    where = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    said = raw.get(where) or {}
    if isinstance(said, Mapping) and layer_type:
        said = said.get(layer_type, said) or {}
    if not isinstance(said, Mapping):
        raise refused(where, f"expected an object, got {said!r}")
    older = raw.get("rope_scaling")
    if layer_type != "sliding_attention" and older and not _within(older, said):
        raise refused("rope_scaling", "says something else than rope_parameters: state one of them")
    name = said.get("rope_type", said.get("type", "default"))
    name = {"su": "longrope", "default": "default"}.get(name, name)  # Phi-3's first spelling
    if name not in list(RopeKind):
        raise refused(where, f"rope type {name!r} is not served (served: {', '.join(RopeKind)})")
    common: dict[str, Any] = {
        "theta": number(said, "rope_theta", number(raw, "rope_theta", _DEFAULT_THETA)),
        "partial": number(said, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0)),
    }
    if not 0.0 < common["partial"] <= 1.0:
        raise refused("partial_rotary_factor", f"expected (0, 1], got {common['partial']!r}")
    kind = RopeKind(name)
    if kind is RopeKind.DEFAULT:
        return RopeConfig(**common)
    stated = positive(raw, "max_position_embeddings", 2048)
    common |= {
        "kind": kind,
        "original_max_position": positive(
            said,
            "original_max_position_embeddings",
            positive(raw, "original_max_position_embeddings", stated),
        ),
    }
    rope = _PARSERS[kind](said, where, common, stated)
    if not rope.factor >= 1.0:
        raise refused(where, f"factor must be at least 1, got {rope.factor!r}")
    return rope


def _within(older: Any, said: Raw) -> bool:
    """Whether `rope_scaling` says nothing that `rope_parameters` does not."""
    known = {"type": said.get("rope_type"), **said}
    return isinstance(older, Mapping) and older.items() <= known.items()


def _parse_factor(said: Raw, where: str, common: dict[str, Any], stated: int) -> RopeConfig:
    return RopeConfig(**common, factor=number(said, "factor"))


def _parse_proportional(said: Raw, where: str, common: dict[str, Any], stated: int) -> RopeConfig:
    return RopeConfig(**common, factor=number(said, "factor", 1.0))


def _parse_llama3(said: Raw, where: str, common: dict[str, Any], stated: int) -> RopeConfig:
    low, high = number(said, "low_freq_factor"), number(said, "high_freq_factor")
    if not 0.0 < low < high:
        raise refused(where, "needs 0 < low_freq_factor < high_freq_factor")
    return RopeConfig(
        **common, factor=number(said, "factor"), low_freq_factor=low, high_freq_factor=high
    )


def _parse_yarn(said: Raw, where: str, common: dict[str, Any], stated: int) -> RopeConfig:
    factor = number(said, "factor", stated / common["original_max_position"])
    scale = said.get("attention_factor")
    if scale is None:
        scale = _mscale(factor, 1.0)
        of, over = said.get("mscale"), said.get("mscale_all_dim")
        if of and over:
            scale = _mscale(factor, number(said, "mscale")) / _mscale(
                factor, number(said, "mscale_all_dim")
            )
    return RopeConfig(
        **common,
        factor=factor,
        scale=float(scale),
        beta_fast=number(said, "beta_fast", 32.0),
        beta_slow=number(said, "beta_slow", 1.0),
        truncate=bool(said.get("truncate", True)),
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _parse_longrope(said: Raw, where: str, common: dict[str, Any], stated: int) -> RopeConfig:
    original = common["original_max_position"]
    factor = number(said, "factor", stated / original)
    scale = said.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return RopeConfig(
        **common,
        factor=max(1.0, factor),
        scale=float(scale),
        short_factor=_factors(said, "short_factor", where),
        long_factor=_factors(said, "long_factor", where),
    )


def _factors(said: Raw, field: str, where: str) -> tuple[float, ...]:
    values = said.get(field)
    if not isinstance(values, (list, tuple)) or not values:
        raise refused(where, f"needs {field}, a list of numbers")
    return tuple(number({field: value}, field) for value in values)


_PARSERS = {
    RopeKind.LINEAR: _parse_factor,
    RopeKind.DYNAMIC: _parse_factor,
    RopeKind.PROPORTIONAL: _parse_proportional,
    RopeKind.LLAMA3: _parse_llama3,
    RopeKind.YARN: _parse_yarn,
    RopeKind.LONGROPE: _parse_longrope,
}
