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
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import unpack

from protocol.codec import encode
from protocol.message import Message

#: KV as e4m3 codes, by torch's name.
FP8_KV = "float8_e4m3fn"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8_KV: 1}


def dtype_between(one: str, other: str) -> str | None:
    """The type in which KV travels between pools of these types, either way: that of both, or
    codes, which a sender with numbers rounds to and a receiver with numbers reads; None: there is
    none."""
    if one == other:
        return one
    return FP8_KV if FP8_KV in (one, other) else None


class KVGroup(Message):
    """Layers of one kind that have a block table together; layer i of the group is in slot i of its
    blocks.

    window: a token sees itself and the window - 1 tokens before it; None: all. num_layers: slots in
    use, None: all. num_kv_heads, head_dim: of its layers, where groups differ in them; a head then
    lies in several heads of the pool, and several layers may share a slot
    (engine.model.kv_groups.KVPlanes).
    """

    window: int | None = None
    num_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None

    def first_token(self, position: int) -> int:
        """The first token that the one at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def num_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that it holds at a time while `num_tokens` run, up to `chunk` a step."""
        total = -(-num_tokens // block_size)
        if self.window is None:
            return total
        return min(total, -(-(self.window + chunk - 2) // block_size) + 1)


#: The groups of a model whose layers all attend to everything.
ONE_GROUP = (KVGroup(),)


def pages_for(groups: tuple[KVGroup, ...], block_size: int, num_tokens: int, chunk: int = 1) -> int:
    """The most blocks, of all groups, that a sequence of `num_tokens` holds at a time when up to
    `chunk` of them run in one step."""
    return sum(group.num_blocks(num_tokens, block_size, chunk) for group in groups)


class KVLayout(Message):
    """One worker's KV pool: `[slot][block, k/v, kv_head, token, head_dim]` on each rank.

    `num_layers` counts slots: a block holds one layer of its group in each. The blocks of all
    `groups` come from this pool. `num_kv_heads` counts the whole model; `rank_heads[r]` is the
    half-open range of KV heads that rank r holds (ranges overlap when ranks outnumber heads,
    because heads are then replicated).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: str
    groups: tuple[KVGroup, ...] = ONE_GROUP
    rank_heads: tuple[tuple[int, int], ...]

    @property
    def tp_size(self) -> int:
        return len(self.rank_heads)

    def token_bytes(self) -> int:
        """KV bytes of one token over all slots and (unreplicated) heads."""
        per_head = 2 * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_layers * self.num_kv_heads * per_head

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one group."""
        return -(-num_tokens // self.block_size)

    def pages_for(self, num_tokens: int, chunk: int = 1) -> int:
        """As the function `pages_for`, for these groups."""
        return pages_for(self.groups, self.block_size, num_tokens, chunk)

    def tokens_in(self, num_blocks: int, *, chunk: int = 1, limit: int | None = None) -> int:
        """Tokens of the longest sequence that so many blocks hold, at most `limit`."""
        lengths = range(1, (num_blocks * self.block_size if limit is None else limit) + 1)
        if len(self.groups) == 1 and self.groups[0].window is None:
            return min(num_blocks * self.block_size, len(lengths))
        return bisect_right(lengths, num_blocks, key=lambda n: self.pages_for(n, chunk))

    def granted_from(self, group: KVGroup, num_tokens: int) -> int:
        """The first block of a group that a hand-off of `num_tokens` fills: what the next token
        sees begins in it."""
        return group.first_token(num_tokens) // self.block_size


class KVFingerprint(Message):
    """Everything that must be equal for KV of one worker to be valid on another; `dtype` may also
    be one that converts (`dtype_between`).

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
        """The first field that keeps KV of one from the other."""
        if self == other:  # nearly always, and routers ask for each request
            return None
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and (name != "dtype" or dtype_between(mine, theirs) is None):
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


DIGEST_BYTES = 32
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


def split_hints(joined: bytes) -> tuple[int, ...]:
    """Hints as numbers."""
    return unpack(f"<{len(joined) // HINT_BYTES}Q", joined)
