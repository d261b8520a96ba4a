"""The shape of a worker's paged KV, the cells in which two workers address it, and the names of its
blocks by content.

A name covers all tokens before: digest(block i) = SHA-256(digest(block i - 1) + token ids of block
i); the seed before block 0 covers everything else that KV depends on. Equal digests mean equal KV
up to rounding, on every worker. Hashing (parent, tokens) of each block is the idea of vLLM's
automatic prefix caching; the hash is cryptographic because a collision would expose another
request's context.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

from protocol.codec import encode
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
        return self.count * self.size

    def places(self, per_block: int) -> tuple[list[int], list[int]]:
        """Each cell's block, of `per_block` cells, and its number within that block."""
        numbers = range(self.first, self.first + self.count)
        return [self.blocks[n // per_block] for n in numbers], [n % per_block for n in numbers]


#: Bytes of a hint, the short form of a digest that routers work with. Two blocks may share one:
#: a hint only ever decides where a request goes.
HINT_BYTES = 8


class CacheChange(Message):
    """Blocks that a worker's prefix cache has gained and lost, as concatenated hints.

    `reset`: earlier changes are void. Removals are applied first.
    """

    reset: bool = False
    added: bytes = b""
    removed: bytes = b""


def chain_seed(fingerprint: KVFingerprint, salt: str = "") -> bytes:
    """The start of a chain. Requests with different salts never share a block."""
    return sha256(encode(fingerprint) + salt.encode()).digest()


def extend_chain(
    digests: list[bytes],
    tokens: Sequence[int],
    *,
    block_size: int,
    seed: bytes,
    max_blocks: int | None = None,
) -> None:
    """Append the digests of the full blocks of `tokens` that `digests` does not reach yet, at most
    `max_blocks` of them."""
    first, full = len(digests), len(tokens) // block_size
    if max_blocks is not None:
        full = min(full, first + max_blocks)
    if first >= full:
        return
    ids = array("I", tokens[first * block_size : full * block_size]).tobytes()
    width = block_size * array("I").itemsize
    parent = digests[-1] if digests else seed
    for start in range(0, len(ids), width):
        parent = sha256(parent + ids[start : start + width]).digest()
        digests.append(parent)


def hints(digests: Iterable[bytes]) -> bytes:
    return b"".join(digest[:HINT_BYTES] for digest in digests)


def split_hints(joined: bytes) -> list[bytes]:
    return [joined[i : i + HINT_BYTES] for i in range(0, len(joined), HINT_BYTES)]
