"""The shape of a worker's paged KV, and the fingerprint two workers must share."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """One worker's KV pool: `[layer][block, k/v, kv_head, token, head_dim]` on each rank.

    `num_kv_heads` counts the whole model; `rank_heads[r]` is the half-open range of KV heads that
    rank r holds (ranges overlap when ranks outnumber heads, because heads are then replicated).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: str
    rank_heads: tuple[tuple[int, int], ...]

    @property
    def tp_size(self) -> int:
        """Ranks of the worker."""
        return len(self.rank_heads)

    def token_bytes(self) -> int:
        """KV bytes of one token over all layers and (unreplicated) heads."""
        per_head = 2 * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_layers * self.num_kv_heads * per_head

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFingerprint:
    """Everything that must be equal for one worker's KV to mean the same on another.

    `weights` is a digest of the checkpoint, `rope` and `model` name what positions and values mean.
    Tensor-parallel degrees are free to differ; block sizes must be equal for now.
    """

    model: str
    weights: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    rope: str

    def differing_field(self, other: KVFingerprint) -> str | None:
        """The name of the first field that differs, or None when the pair fits."""
        for name in self.__dataclass_fields__:
            if getattr(self, name) != getattr(other, name):
                return name
        return None
