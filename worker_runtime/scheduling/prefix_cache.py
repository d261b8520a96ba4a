"""Blocks for sequences, with whatever of their KV is in the cache already.

Only full blocks are shared, and a full block is never written again: where sequences part inside a
block, each fills a block of its own. That is copy-on-write without the copy: the tokens before the
parting, less than a block of them, are computed or sent once more.
"""

from __future__ import annotations

from engine.kv.allocator import BlockAllocator
from protocol.kv_layout import KVFingerprint
from protocol.prefix import chain_seed, extend_chain
from worker_runtime.scheduling.messages import PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES
from worker_runtime.scheduling.sequence import Sequence


class PrefixCache:
    """What a scheduler knows of content: it names blocks once their KV is computed, finds them for
    later sequences, and lets sequences that run at the same time follow one another. Changes
    `block_ids`, `num_computed` and the cache fields of a sequence, nothing else.

    Not `enabled`, it gives blocks as the allocator does.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        fingerprint: KVFingerprint,
        enabled: bool,
    ) -> None:
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._fingerprint = fingerprint
        self._enabled = enabled
        self._num_queried = 0
        self._num_hit = 0

    def take(
        self, sequence: Sequence, num_blocks: int, *, computes: bool = True, spare: int = 0
    ) -> bool:
        """Give a sequence `num_blocks` blocks, of which the first may hold the KV of its tokens.

        `num_computed` says of how many: never of all when it `computes` here, because the last
        token has to run. False, and nothing is changed, when there are not that many blocks or less
        than `spare` would be left.
        """
        reusable = self._reusable(sequence, computes=computes)
        shared = self._blocks.find(sequence.digests[:reusable])
        num_held = sum(map(self._blocks.is_held, shared))
        if num_blocks - num_held + spare > self._blocks.num_available:
            return False
        self._blocks.retain(shared)
        fresh = self._blocks.allocate(num_blocks - len(shared))
        assert fresh is not None
        sequence.block_ids = [*shared, *fresh]
        sequence.num_named = len(shared)
        sequence.num_reusable = reusable
        sequence.num_computed = len(shared) * self._block_size
        self._count(sequence)
        return True

    def found(self, sequence: Sequence) -> int:
        """Tokens whose KV would be there if the sequence came now."""
        reusable = self._reusable(sequence, computes=True)
        return self._block_size * len(self._blocks.find(sequence.digests[:reusable]))

    def catch_up(self, sequence: Sequence) -> bool:
        """Take over blocks that others have computed since `take`; whether there were any. Not
        while a step of the sequence is in flight."""
        first = sequence.num_computed // self._block_size
        if sequence.num_in_flight or first >= sequence.num_reusable:
            return False
        found = self._blocks.find(sequence.digests[first : sequence.num_reusable])
        if not found:
            return False
        end = first + len(found)
        self._blocks.retain(found)
        self._blocks.free(sequence.block_ids[first:end])
        sequence.block_ids[first:end] = found
        known = max(sequence.num_computed, sequence.num_once_computed)
        num_spared = max(0, end * self._block_size - known)
        sequence.num_cached_tokens += num_spared
        self._num_hit += num_spared
        sequence.num_computed = end * self._block_size
        sequence.num_named = end
        return True

    def keep(self, sequence: Sequence) -> None:
        """The KV of `num_computed` tokens is there for good: its full blocks may be shared."""
        full = sequence.num_computed // self._block_size
        if not self._enabled or full <= sequence.num_named:
            return
        self._extend(sequence)
        for i in range(sequence.num_named, full):
            self._blocks.name(sequence.block_ids[i], sequence.digests[i])
        sequence.num_named = full

    def names_ahead(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Names of the shareable blocks that the next `num_tokens` tokens to be launched are in."""
        start = sequence.num_computed + sequence.num_in_flight
        end = -(-(start + num_tokens) // self._block_size)
        return sequence.digests[start // self._block_size : min(end, sequence.num_reusable)]

    def last_name(self, sequence: Sequence) -> bytes | None:
        """The name of a waiting sequence's last full block, which stands for all before it."""
        self._extend(sequence)
        return sequence.digests[-1] if sequence.digests else None

    def counters(self) -> dict[str, int]:
        """Tokens looked up and found, since the start."""
        return {
            PREFIX_CACHE_QUERIES: self._num_queried,
            PREFIX_CACHE_HITS: self._num_hit,
        }

    def _reusable(self, sequence: Sequence, *, computes: bool) -> int:
        """Blocks that may come from the cache."""
        if not self._enabled or (computes and not sequence.reuses_prefix):
            return 0
        self._extend(sequence)
        return (len(sequence.tokens) - computes) // self._block_size

    def _extend(self, sequence: Sequence) -> None:
        digests, size = sequence.digests, self._block_size
        if self._enabled and len(digests) < len(sequence.tokens) // size:
            seed = b"" if digests else chain_seed(self._fingerprint, sequence.submit.cache_salt)
            extend_chain(digests, sequence.tokens, block_size=size, seed=seed)

    def _count(self, sequence: Sequence) -> None:
        """What a sequence that was preempted finds again, it has computed itself."""
        if sequence.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_cached_tokens, sequence.num_computed)
            return
        sequence.num_cached_tokens = sequence.num_computed
        if self._enabled:
            self._num_queried += len(sequence.tokens)
            self._num_hit += sequence.num_computed
