"""What a router knows of the prefix caches of its workers, and of the blocks of a prompt.

All of it is advice: a view that is behind, or two blocks with the same hint, make a request go to a
worker that computes more than another would have, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from protocol.ids import RequestKey
from protocol.kv_layout import KVFingerprint
from protocol.prefix import CacheChange, chain_seed, extend_chain, hints, split_hints


class PromptBlocks:
    """The hints of a prompt's full blocks, hashed once for each kind of worker (half a microsecond
    a block). The outputs of one prompt share it."""

    def __init__(self, prompt_ids: Sequence[int], salt: str = "") -> None:
        self.num_tokens = len(prompt_ids)
        self._ids = prompt_ids
        self._salt = salt
        self._hints: dict[tuple[KVFingerprint, int], list[bytes]] = {}

    def hints(self, fingerprint: KVFingerprint, block_size: int) -> list[bytes]:
        """As workers of this fingerprint and block size name them."""
        kind = fingerprint, block_size
        known = self._hints.get(kind)
        if known is None:
            digests: list[bytes] = []
            seed = chain_seed(fingerprint, self._salt)
            extend_chain(digests, self._ids, block_size=block_size, seed=seed)
            known = self._hints[kind] = split_hints(hints(digests))
        return known


class PrefixView:
    """The prefix cache of one incarnation of a worker, as far as it has told, and what requests
    under way will add to it."""

    def __init__(self) -> None:
        self.speaks = False  # a worker without a prefix cache never says a word about it
        self._held: set[bytes] = set()
        self._expected: Counter[bytes] = Counter()
        self._by_request: dict[RequestKey, Sequence[bytes]] = {}

    def take(self, change: CacheChange) -> None:
        """The worker has told something."""
        self.speaks = True
        if change.reset:
            self._held.clear()
        self._held.difference_update(split_hints(change.removed))
        self._held.update(split_hints(change.added))

    def forget(self) -> None:
        """The worker is out of reach: it will tell everything anew."""
        self.speaks = False
        self._held.clear()

    def expect(self, key: RequestKey, blocks: Sequence[bytes]) -> None:
        """A request that has these blocks is about to go there. Undone by `release`."""
        if self.speaks and key not in self._by_request:
            new = blocks[self.num_held(blocks) :]
            self._by_request[key] = new
            self._expected.update(new)

    def release(self, key: RequestKey) -> None:
        """The request has ended. Idempotent."""
        for block in self._by_request.pop(key, ()):
            self._expected[block] -= 1
            if not self._expected[block]:
                del self._expected[block]

    def num_held(self, blocks: Sequence[bytes]) -> int:
        """How many of `blocks`, from the first, are there."""
        return _leading(blocks, self._held.__contains__)

    def num_expected(self, blocks: Sequence[bytes]) -> int:
        """How many of `blocks`, from the first, are there or on their way."""
        return _leading(blocks, lambda block: block in self._held or block in self._expected)


def _leading(blocks: Sequence[bytes], known: Callable[[bytes], bool]) -> int:
    """Length of the leading run of known blocks, by bisection: a worker that has a block has those
    before it, but for rare exceptions that do no harm."""
    return bisect_left(blocks, True, key=lambda block: not known(block))
