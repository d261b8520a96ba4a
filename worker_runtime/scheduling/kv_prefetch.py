"""KV from host memory before a sequence starts, for models of several KV groups. Pure.

What layers with a window need lies at the end of what is reused: all of it is here, or a sequence
computes from its beginning. So a sequence waits without blocks, as for a loan (peer_blocks), and
finds what has come in the prefix cache.
"""

from __future__ import annotations

from engine.kv.allocator import BlockAllocator
from kv_tiers.commands import CopyKind, Tier
from kv_tiers.cost import Candidate, cheapest
from protocol.timeline import Phase
from worker_runtime.scheduling.kv_copies import Store
from worker_runtime.scheduling.kv_tiers import ComputeSeconds, KVTiers
from worker_runtime.scheduling.prefix_cache import PrefixCache
from worker_runtime.scheduling.sequence import Sequence


class KVPrefetch:
    """Brings blocks into the pool for sequences that have none yet."""

    def __init__(self, cache: PrefixCache, blocks: BlockAllocator, tiers: KVTiers) -> None:
        """`cache`: over the same `blocks` and `tiers` as those of the schedulers."""
        self._cache = cache
        self._blocks = blocks
        self._tiers = tiers

    def brings(self, sequence: Sequence, compute_s: ComputeSeconds, now: float) -> bool:
        """Whether a sequence without blocks should wait: KV of its beginning is on its way. Orders
        that, once, if it is cheaper than computing."""
        fetch = sequence.fetch
        if fetch is not None:
            if fetch in self._tiers.copies.running:
                return True
            sequence.stats.end(Phase.KV_LOAD, now)
            return False
        have = self._cache.num_in_pool(self._cache.reusable(sequence))
        end, needed = self._cache.with_host(sequence)
        missing = [name for name in needed if not self._blocks.find((name,))]
        running = self._tiers.copies.coming(missing)
        if running is not None:
            sequence.fetch = running
        elif end > have and self._is_cheaper(sequence, have, end, len(missing), compute_s, now):
            self._fetch(sequence, needed, missing, end - have, now)
        return sequence.fetch is not None

    def _is_cheaper(
        self,
        sequence: Sequence,
        have: int,
        end: int,
        num_missing: int,
        compute_s: ComputeSeconds,
        now: float,
    ) -> bool:
        seconds = self._tiers.costs.load_s([Tier.HOST] * num_missing, now)
        candidates = [Candidate(num_blocks=n, seconds=s) for n, s in ((have, 0.0), (end, seconds))]
        size, num_tokens = self._blocks.block_size, len(sequence.tokens)
        best = cheapest(candidates, lambda count: compute_s(count * size, num_tokens))
        if best.num_blocks < end:
            self._tiers.counters.refuse(Tier.HOST, "cost")
        return best.num_blocks == end

    def _fetch(
        self, sequence: Sequence, needed: list[bytes], missing: list[bytes], num: int, now: float
    ) -> None:
        here = [block for name in needed for block in self._blocks.find((name,))]
        self._blocks.retain(here)  # what comes must not take their place
        fresh = self._blocks.allocate(len(missing))
        if fresh is not None:
            slots = self._tiers.slots.lease(missing)
            stores = tuple(Store(*each, ()) for each in zip(missing, fresh, strict=True))
            copies = self._tiers.copies
            copy = copies.start(CopyKind.LOAD, blocks=fresh, slots=slots, stores=stores)
            rate = self._tiers.costs.rates[Tier.HOST]
            rate.begin(copy.number, len(slots) * self._tiers.slot_bytes, now)
            self._blocks.free(fresh)  # the copy refers to them
            sequence.fetch = copy.number
            sequence.stats.begin(Phase.KV_LOAD, now)
            num_tokens = num * self._blocks.block_size
            sequence.stats.num_loaded[Tier.HOST] += num_tokens
            self._tiers.counters.hit([Tier.HOST] * num, self._blocks.block_size)
        self._blocks.free(here)
