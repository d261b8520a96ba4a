"""Scales of keys and values that a checkpoint was calibrated with.

A calibrated checkpoint says by how much to divide keys and values so that they fit e4m3. Scales are
rounded up to powers of two, which no number type rounds, and become part of the matrices around the
attention: keys and values leave their products divided, queries and the output's inputs multiplied.
Kernels and KV know nothing of them.

Names of the tensors: compressed-tensors (`k_scale`), its earlier form and AutoFP8
(`k_proj.output_scale`), ModelOpt (`k_proj.k_scale`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import ModelRefused

if TYPE_CHECKING:  # it needs torch, which commands do without
    from engine.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class KvScale:
    """What a layer's keys and its values are divided by: powers of two."""

    key: float = 1.0
    value: float = 1.0


#: One for each layer, or none where the checkpoint has no scales.
KvScales = tuple[KvScale, ...]


def read_kv_scales(source: Checkpoint, num_layers: int) -> KvScales:
    """The scales of all layers. Raises ModelRefused naming tensor and file when some are missing,
    or are no scale."""
    layers = [
        [_name(source, f"model.layers.{index}.self_attn", kind) for kind in "kv"]
        for index in range(num_layers)
    ]
    if not any(name for layer in layers for name in layer):
        return ()
    return tuple(
        KvScale(
            *(_power(source, index, kind, name) for kind, name in zip("kv", layer, strict=True))
        )
        for index, layer in enumerate(layers)
    )


def describe_kv_scales(scales: KvScales) -> str:
    """For fingerprints: KV that was divided by other scales means something else. Empty without
    scales."""
    exponents = (int(math.log2(number)) for scale in scales for number in (scale.key, scale.value))
    return ",".join(map(str, exponents))


def _name(source: Checkpoint, module: str, kind: str) -> str | None:
    names = (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"{kind}_proj.output_scale")
    return next((f"{module}.{n}" for n in names if source.header(f"{module}.{n}")), None)


def _power(source: Checkpoint, layer: int, kind: str, name: str | None) -> float:
    if name is None:
        missing = f"model.layers.{layer}.self_attn.{kind}_scale"
        raise ModelRefused(
            f"{source.place(missing)}: tensor {missing} is missing, but other layers have scales "
            "of KV",
            param=missing,
        )
    stored, path = source.stored(name), source.place(name)
    if stored.numel() != 1 or not stored.is_floating_point():
        raise ModelRefused(
            f"{path}: tensor {name} is {stored.dtype} {list(stored.shape)}, not one number for "
            "the layer",
            param=name,
        )
    scale = float(stored)
    if not (math.isfinite(scale) and scale > 0.0):
        raise ModelRefused(f"{path}: tensor {name} is {scale}, which is no scale", param=name)
    fraction, exponent = math.frexp(scale)  # fraction is 0.5 for powers of two
    return math.ldexp(1.0, exponent - (fraction == 0.5))
