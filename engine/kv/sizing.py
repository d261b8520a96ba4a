"""Number of KV blocks, their layout, and the fingerprint of their content."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.model.config import ModelConfig
from engine.model.kv_groups import KVPlanes, group_layers
from engine.model.kv_scales import describe_kv_scales, read_kv_scales
from engine.model.sharding import Span, rank_heads, share_of
from protocol.kv_layout import DTYPE_BYTES, KVFingerprint, KVLayout

if TYPE_CHECKING:  # it needs torch, which commands do without
    from engine.model.checkpoint import Checkpoint

#: Without a setting a CPU engine takes 1 / this of the free memory, up to a cap.
_FREE_SHARE = 8
_FREE_CAP = 1 << 30


def num_kv_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """Blocks per rank: as configured, or as many as fit the memory budget."""
    if config.num_blocks is not None:
        return config.num_blocks
    budget = config.kv_memory_bytes
    if budget is None:
        budget = min(_FREE_CAP, available_memory() // _FREE_SHARE)
    blocks = budget // block_bytes(config, model)
    if blocks < 1:
        raise ModelRefused(
            f"{budget} bytes do not hold one KV block of {block_bytes(config, model)} bytes",
            param="kv_memory_bytes",
        )
    return blocks


def context_length(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of the longest sequence: as configured, or as many as the model has positions."""
    positions = model.max_position_embeddings
    return min(config.max_model_len or positions, positions)


def kv_layout(config: EngineConfig, model: ModelConfig, num_blocks: int) -> KVLayout:
    layers = group_layers(model, context_length(config, model))
    return KVLayout(
        num_layers=layers.depth,
        num_kv_heads=layers.planes.count,
        head_dim=layers.planes.plane_dim,
        block_size=config.block_size,
        num_blocks=num_blocks,
        dtype=config.kv_type,
        groups=layers.groups,
        rank_heads=rank_planes(model, layers.planes, config.tp_size),
    )


def rank_planes(model: ModelConfig, planes: KVPlanes, size: int) -> tuple[Span, ...]:
    """The planes of a slot that each rank holds: those of its KV heads."""
    if len(set(model.kv_shapes)) == 1:
        return rank_heads(model, size)
    share_of(model, 0, size)  # raises ModelRefused where ranks cannot share them evenly
    width = planes.count // size
    return tuple((rank * width, (rank + 1) * width) for rank in range(size))


def kv_fingerprint(
    config: EngineConfig, model: ModelConfig, source: Checkpoint, max_model_len: int
) -> KVFingerprint:
    """What must be equal for two workers to share KV. `max_model_len`: the context for which rotary
    embeddings are fixed."""
    if config.kv_family:
        scales = describe_kv_scales(read_kv_scales(source, model.num_layers))
        weights = f"family {config.kv_family} {source.family_digest()} {scales}".rstrip()
    else:
        weights = " ".join(filter(None, (source.digest(), weight_format(config, model))))
    return KVFingerprint(
        model=model.describe(),
        weights=weights,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=config.kv_type,
        rope=model.describe_positions(max_model_len),
    )


def weight_format(config: EngineConfig, model: ModelConfig) -> str:
    """How the matrices are quantised, in the checkpoint or at load; empty: not at all."""
    stored = model.quantization
    return config.quantization or ("" if stored is None else stored.describe())


def block_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of one block on the rank that holds most KV heads."""
    layers = group_layers(model, context_length(config, model))
    ranks = rank_planes(model, layers.planes, config.tp_size)
    planes, tokens = max(last - first for first, last in ranks), layers.depth * config.block_size
    return 2 * planes * layers.planes.plane_dim * tokens * DTYPE_BYTES[config.kv_type]


def available_memory() -> int:
    """Bytes of free memory, as Linux estimates it."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _FREE_CAP
