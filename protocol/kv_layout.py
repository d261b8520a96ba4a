"""The shape of a worker's paged KV, what two workers must have in common, and the cells in which
KV is addressed between them."""

from __future__ import annotations

from protocol.message import Message

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(Message):
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
        return len(self.rank_heads)

    def token_bytes(self) -> int:
        """KV bytes of one token over all layers and (unreplicated) heads."""
        per_head = 2 * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_layers * self.num_kv_heads * per_head

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


class KVFingerprint(Message):
    """Everything that must be equal for KV of one worker to be valid on another.

    `weights` is a digest of the checkpoint, `rope` and `model` name the meaning of positions and
    values. Tensor-parallel degrees and block sizes may differ.
    """

    model: str
    weights: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    rope: str

    def differing_field(self, other: KVFingerprint) -> str | None:
        """The name of the first field that differs, or None when the pair fits."""
        for name in self.__struct_fields__:
            if getattr(self, name) != getattr(other, name):
                return name
        return None


class Cells(Message):
    """KV of consecutive tokens in one worker's blocks: `count` cells of `size` tokens each, in
    order through `blocks`, beginning with cell `first` of blocks[0].

    `size` divides the block size, so no cell spans two blocks. Between two workers it is the
    greatest common divisor of their block sizes.
    """

    blocks: tuple[int, ...]
    size: int
    first: int = 0
    count: int

    @classmethod
    def within(
        cls, blocks: tuple[int, ...], block_size: int, *, size: int, first: int, count: int
    ) -> Cells:
        """The cells `first`, `first` + 1, ... of the row that `blocks` make."""
        start, offset = divmod(first, block_size // size)
        end = -(-(first + count) * size // block_size)
        return cls(blocks=blocks[start:end], size=size, count=count, first=offset)

    @property
    def num_tokens(self) -> int:
        """Tokens that the cells have room for."""
        return self.count * self.size

    def places(self, per_block: int) -> tuple[list[int], list[int]]:
        """Each cell's block, of `per_block` cells, and its number within that block."""
        numbers = range(self.first, self.first + self.count)
        return [self.blocks[n // per_block] for n in numbers], [n % per_block for n in numbers]
