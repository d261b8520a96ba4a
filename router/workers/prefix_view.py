"""What a router knows of the prefix caches of its workers, and of the blocks of a prompt.

All of it is advice: after a stale view or a hash collision a worker computes more than another
would have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from protocol.ids import RequestKey
from protocol.kv_layout import KVFingerprint
from protocol.prefix import CacheChange, chain_seed, extend_chain, hints, split_hints


class PromptBlocks:
    """The hints (short hashes) of a prompt's full blocks, made once per kind of worker in half a
    microsecond a block. The outputs of one prompt share them."""

    def __init__(self, prompt_ids: Sequence[int], salt: str = "") -> None:
        self.num_tokens = len(prompt_ids)
        self._ids = prompt_ids
        self._salt = salt
        self._hints: dict[tuple[KVFingerprint, int], list[bytes]] = {}

    def hints(self, fingerprint: KVFingerprint, block_size: int) -> list[bytes]:
        """The hints for workers of this fingerprint and block size."""
        kind = fingerprint, block_size
        known = self._hints.get(kind)
        if known is None:
            digests: list[bytes] = []
            seed = chain_seed(fingerprint, self._salt)
            extend_chain(digests, self._ids, block_size=block_size, seed=seed)
            known = self._hints[kind] = split_hints(hints(digests))
        return known


class PrefixView:
    """The prefix cache of one incarnation of a worker by its reports, and the blocks that requests
    in flight will add."""

    def __init__(self) -> None:
        self.reports = False  # a worker without a prefix cache never reports
        self._held: set[bytes] = set()
        self._expected: Counter[bytes] = Counter()
        self._by_request: dict[RequestKey, Sequence[bytes]] = {}

    def take(self, change: CacheChange) -> None:
        self.reports = True
        if change.reset:
            self._held.clear()
        self._held.difference_update(split_hints(change.removed))
        self._held.update(split_hints(change.added))

    def forget(self) -> None:
        """The worker is disconnected; it reports everything anew."""
        self.reports = False
        self._held.clear()

    def expect(self, key: RequestKey, blocks: Sequence[bytes]) -> None:
        """A request with these blocks is submitted there. Undone by `release`."""
        if self.reports and key not in self._by_request:
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
        """How many leading `blocks` are cached."""
        return _leading(blocks, self._held.__contains__)

    def num_expected(self, blocks: Sequence[bytes]) -> int:
        """How many leading `blocks` are cached or expected."""
        return _leading(blocks, lambda block: block in self._held or block in self._expected)


def _leading(blocks: Sequence[bytes], known: Callable[[bytes], bool]) -> int:
    """Length of the leading run of known blocks, by bisection: a worker that has a block has those
    before it, with rare and harmless exceptions."""
    return bisect_left(blocks, True, key=lambda block: not known(block))
