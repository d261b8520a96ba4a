"""Content names of full KV blocks: a chain of digests, so that a name covers all tokens before.

digest(block i) = SHA-256(digest(block i - 1) + token ids of block i); the seed before block 0
covers everything else that KV depends on. Equal digests mean equal KV up to rounding, on every
worker. Hashing (parent, tokens) of each block is the idea of vLLM's automatic prefix caching; the
hash is cryptographic because a collision would expose another request's context.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

from protocol.codec import encode
from protocol.kv_layout import KVFingerprint
from protocol.message import Message

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
    """The short forms, one after another."""
    return b"".join(digest[:HINT_BYTES] for digest in digests)


def split_hints(joined: bytes) -> list[bytes]:
    return [joined[i : i + HINT_BYTES] for i in range(0, len(joined), HINT_BYTES)]
