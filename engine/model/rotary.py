"""Rotary position tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.config import RopeConfig, RopeKind


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each plane, float32 `[D / 2]`. Computed in float32 like the reference
    implementations: the last bit matters once multiplied by a large position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    return plain if rope.kind is RopeKind.DEFAULT else _llama3(plain, rope)


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: wavelengths over original / low_freq_factor are stretched by `factor`, those under
    original / high_freq_factor kept, those between blended."""
    original = rope.original_max_position
    wavelength = 2 * math.pi / plain
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = (original / wavelength - rope.low_freq_factor) / span
    blended = (1 - keep) * plain / rope.factor + keep * plain
    long = wavelength > original / rope.low_freq_factor
    short = wavelength < original / rope.high_freq_factor
    return torch.where(long, plain / rope.factor, torch.where(short, plain, blended))


def rotary_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and plane, float32 `[positions, D / 2]` each."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return angles.cos(), angles.sin()
