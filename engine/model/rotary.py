"""Rotary position tables, from the frequencies of every kind of RoPE."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.rope import RopeConfig, RopeKind


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each plane that turns, float32 `[rotary_dim / 2]`.

    In float32 throughout, as the reference implementations compute it: the last bit counts when it
    is multiplied by a position in the thousands.
    """
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    powers = rope.theta**exponents
    if rope.kind is RopeKind.PROPORTIONAL:
        still = torch.arange(dim // 2) >= int(rope.partial * dim // 2)
        return (1.0 / powers).masked_fill_(still, 0.0) / rope.factor
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(1.0 / powers, rope)
    if rope.kind is RopeKind.YARN:
        return _yarn(powers, rope, dim)
    if rope.kind is RopeKind.LONGROPE:
        return 1.0 / (torch.tensor(rope.short_factor, dtype=torch.float32) * powers)
    return 1.0 / powers / (rope.factor if rope.kind is RopeKind.LINEAR else 1.0)


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Wavelengths over original / low_freq_factor are stretched by `factor`, those under
    original / high_freq_factor kept, those between blended."""
    original = rope.original_max_position
    wavelength = 2 * math.pi / plain
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = (original / wavelength - rope.low_freq_factor) / span
    blended = (1 - keep) * plain / rope.factor + keep * plain
    long = wavelength > original / rope.low_freq_factor
    short = wavelength < original / rope.high_freq_factor
    return torch.where(long, plain / rope.factor, torch.where(short, plain, blended))


def _yarn(powers: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """Planes that turn more than beta_fast times within the original context keep their frequency,
    those under beta_slow times are stretched by `factor`, with a ramp between."""

    def plane(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = plane(rope.beta_fast), plane(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp is a step then
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def rotary_tables(
    rope: RopeConfig | None, head_dim: int, num_positions: int
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and plane, float32 `[positions, head_dim / 2]` each.

    `rope` is fixed (RopeConfig.fixed). Planes that do not turn have cos 1 and sin 0, all of them
    where `rope` is None. Heads with such planes are stored in another order: `rotary_order`.
    """
    cos = torch.ones(num_positions, head_dim // 2)
    sin = torch.zeros(num_positions, head_dim // 2)
    if rope is not None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(rope, head_dim)[None, :]
        cos[:, : angles.shape[1]] = angles.cos() * rope.scale
        sin[:, : angles.shape[1]] = angles.sin() * rope.scale
    return cos, sin


def rotary_order(rotary_dim: int, head_dim: int) -> Tensor | None:
    """The order in which q and k keep a head's dimensions, None for the checkpoint's own.

    Kernels turn dimension i against i + head_dim / 2. Where only the first `rotary_dim` turn, among
    themselves, their halves are moved there; scores do not depend on the order.
    """
    if rotary_dim == head_dim:
        return None
    turn, rest = torch.arange(rotary_dim).chunk(2), torch.arange(rotary_dim, head_dim).chunk(2)
    return torch.cat((turn[0], rest[0], turn[1], rest[1]))
