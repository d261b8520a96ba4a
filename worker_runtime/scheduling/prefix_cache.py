"""Allocates blocks to sequences, reusing cached KV of the same prefix.

Only full blocks are shared, and a full block is never written again: where two sequences diverge
inside a block, each fills a block of its own. That is copy-on-write without the copy; less than a
block of tokens is computed or sent again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from engine.kv.allocator import BlockAllocator
from protocol.kv_layout import DIGEST_BYTES, KVFingerprint, chain_seed, extend_chain
from protocol.messages import Submit
from worker_runtime.scheduling.kv_tiers import ComputeSeconds, KVTiers
from worker_runtime.scheduling.messages import PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES, Reserve
from worker_runtime.scheduling.sequence import Sequence

#: Blocks hashed between two releases of the interpreter lock, 0.2 ms; a release takes 0.07.
HASH_SLICE = 256


class PrefixCache:
    """Names blocks once their KV is computed, finds them for later sequences, and lets sequences
    that run at the same time reuse each other's. Changes `tables`, `num_computed`, `digests` and
    the cache statistics of a sequence. When not `enabled`, it only allocates.

    In the first KV group a block's name is its digest; in the others the group's number follows.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        fingerprint: KVFingerprint,
        enabled: bool,
        tiers: KVTiers | None = None,
        compute_s: ComputeSeconds = lambda _start, _end: 0.0,
    ) -> None:
        """`tiers`: hold what the pool evicts. `compute_s`: how long tokens start .. end - 1 of a
        prompt take to compute; 0 when unknown."""
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._fingerprint = fingerprint
        self._enabled = enabled
        self._tiers = tiers if enabled else None
        self._compute_s = compute_s
        self._num_queried = 0
        self._num_hit = 0

    def allocate(
        self,
        sequence: Sequence,
        num_tokens: int,
        *,
        chunk: int | None = None,
        received: int | None = None,
        spare: int = 0,
        now: float = 0.0,
    ) -> bool:
        """Give a sequence blocks for `num_tokens` tokens, cached ones first; sets `num_computed`.

        chunk: tokens of it that one step runs; groups with a window get no more blocks than that
        takes at a time. It always runs its last token, so not all of its tokens count as computed.
        What lower tiers have is then on its way (`Sequence.loading`).
        received: instead, a hand-off brings the KV of so many tokens, but for what is cached; of
        groups with a window only what the token after them sees.
        False, with nothing changed, when fewer than `spare` blocks would stay free.
        """
        names, position = self.reusable(sequence, received), received
        num_shared, found = self._find(names, 0, position)
        shared = [block for blocks in found for block in blocks]
        tables = self._blocks.new_tables()
        tables.drop_unseen(num_shared * self._block_size if position is None else position)
        tables.reuse(num_shared, found)
        num_missing = tables.missing(num_tokens, chunk)
        num_cached = self._blocks.count_cached(shared)
        if num_missing + num_cached + spare > self._blocks.num_available:
            return False
        self._blocks.retain(shared)
        fresh = self._blocks.allocate(num_missing)
        assert fresh is not None
        tables.extend(num_tokens, fresh, chunk)
        sequence.tables = tables
        sequence.resume_at(num_shared * self._block_size)
        self._count(sequence)
        if self._tiers is not None:
            self._touch(names[:num_shared], sequence)
            if chunk is not None and self._blocks.has_one_chain:
                self._tiers.load_ahead(sequence, self.reusable(sequence), now, self._compute_s)
        return True

    def num_cached(self, sequence: Sequence) -> int:
        """Tokens that `allocate` would find cached now, or in host memory."""
        if self._tiers is not None and not self._blocks.has_one_chain:
            return self._block_size * self.with_host(sequence)[0]
        names = self.reusable(sequence)
        end, _ = self._find(names)
        if self._tiers is not None:
            end += self._tiers.num_held(names[end:])
        return self._block_size * end

    def num_in_pool(self, names: list[bytes]) -> int:
        """How many leading blocks of a sequence `allocate` would find in the pool now."""
        return self._find(names)[0]

    def expected_s(
        self, sequence: Sequence, have: int, compute_s: ComputeSeconds, now: float
    ) -> float:
        """Seconds until a sequence with its first `have` blocks could have computed all its tokens,
        with what lower tiers hold; 0 when unknown."""
        size, num_tokens = self._block_size, len(sequence.tokens)
        if self._tiers is None:
            return compute_s(have * size, num_tokens)
        return self._tiers.expected_s(self.reusable(sequence), have, num_tokens, now, compute_s)

    def grant(self, sequence: Sequence, num_tokens: int) -> Reserve:
        """The blocks of a sequence whose first `num_tokens` tokens a hand-off brings."""
        tables, num_blocks = sequence.tables, self._blocks.blocks_for(num_tokens)
        return Reserve(
            key=sequence.key,
            block_tables=tuple(
                tables.part(group, 0, num_blocks) for group in range(len(tables.groups))
            ),
            num_cached_blocks=sequence.num_computed // self._block_size,
            num_tokens=num_tokens,
        )

    def quarantine(self, sequence: Sequence) -> None:
        """Set aside the blocks that a hand-off may still write to: all but the cached ones."""
        self._blocks.free(sequence.tables.drop_before(sequence.num_computed // self._block_size))
        sequence.resume_at(0)
        self._blocks.quarantine(sequence.tables.blocks())

    def catch_up(self, sequence: Sequence) -> bool:
        """Reuse blocks that other sequences have computed since `allocate`; whether there were any.
        Not while a step of the sequence is in flight."""
        first = sequence.num_computed // self._block_size
        if sequence.in_flight:
            return False
        end, found = self._find(self.reusable(sequence), first)
        if end <= first:  # a sequence that reuses nothing finds nothing
            return False
        for blocks in found:
            self._blocks.retain(blocks)
        self._blocks.free(sequence.tables.reuse(end, found))
        self._blocks.free(sequence.tables.drop_unseen(end * self._block_size))
        known = max(sequence.num_computed, sequence.num_once_computed)
        num_spared = max(0, end * self._block_size - known)
        sequence.stats.num_cached_tokens += num_spared
        self._num_hit += num_spared
        sequence.resume_at(end * self._block_size)
        return True

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """KV of the last `num_tokens` computed tokens was written: full blocks can be shared."""
        first = (sequence.num_computed - num_tokens) // self._block_size
        full = sequence.num_computed // self._block_size
        if not self._enabled or full <= first:
            return
        digests, tables = self._digests(sequence), sequence.tables
        for group, ids in enumerate(tables.ids):
            skipped = tables.first[group]
            start = max(first, skipped, tables.complete[group])
            if start >= full:
                continue
            names = digests if not group else [_name(each, group) for each in digests[:full]]
            self._blocks.name(ids[start - skipped : full - skipped], names[start:full])
            if self._tiers is not None:
                self._tiers.published(names, start, tables.part(group, start, full))

    def withdraw(self, sequence: Sequence) -> None:
        """KV of a sequence is unusable: no later sequence finds its blocks."""
        self._blocks.forget(sequence.tables.blocks())
        if self._tiers is not None:
            names, groups = self._digests(sequence), range(len(self._blocks.groups))
            self._tiers.forget([_name(name, group) for group in groups for name in names])

    def _touch(self, names: list[bytes], sequence: Sequence) -> None:
        """Lower tiers keep these leading blocks of a sequence longest."""
        assert self._tiers is not None
        if not self._blocks.has_one_chain:
            _, starts = self._reach(names, 0, None, lambda some: sum(1 for _ in some))
            names = self._needed(names, len(names), starts)
        self._tiers.slots.touch(names, sequence.keep_until)

    def released(self, sequence: Sequence) -> None:
        """A sequence is about to give up its blocks: lower tiers keep what it used last longest."""
        if self._tiers is not None and sequence.reuses_prefix:
            names = sequence.digests[: sequence.num_computed // self._block_size]
            self._touch(names, sequence)

    def go_on(self, sequence: Sequence, now: float) -> None:
        """The load that a sequence waited for is over: take what it brought, load the rest."""
        assert self._tiers is not None
        self.catch_up(sequence)
        self._tiers.load_ahead(sequence, self.reusable(sequence), now, self._compute_s)

    def frees_soon(self, num_blocks: int) -> bool:
        """Whether there are so many blocks once copies between tiers have ended."""
        if self._tiers is None:
            return False
        return self._blocks.num_available + self._tiers.copies.num_leased_alone >= num_blocks

    def take_changes(self) -> dict[bytes, bool]:
        """Digests that the first KV group has gained (True) or lost (False) since the last call."""
        changes = self._blocks.take_changes()
        if len(self._blocks.groups) == 1:
            return changes
        return {name: kept for name, kept in changes.items() if len(name) == DIGEST_BYTES}

    def names_ahead(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Names of the shareable blocks that the next `num_tokens` tokens to launch are in."""
        start = sequence.num_launched
        end = -(-(start + num_tokens) // self._block_size)
        return self.reusable(sequence)[start // self._block_size : end]

    def last_name(self, sequence: Sequence) -> bytes | None:
        """Name of a waiting sequence's last full block, which covers all before it."""
        digests = self._digests(sequence)
        return digests[-1] if digests else None

    def counters(self) -> dict[str, int]:
        """Tokens looked up and found since the start."""
        return {PREFIX_CACHE_QUERIES: self._num_queried, PREFIX_CACHE_HITS: self._num_hit}

    def _find(
        self, names: list[bytes], have: int = 0, position: int | None = None
    ) -> tuple[int, list[list[int]]]:
        """How many of the blocks `names` can be reused by a sequence that has the first `have`, and
        for each KV group the cached blocks that it then takes, the last before that number."""
        blocks = self._blocks
        if blocks.has_one_chain:
            found = blocks.find(names[have:])
            return have + len(found), [found]
        end, starts = self._reach(names, have, position, lambda some: len(blocks.find(some)))
        return end, [
            blocks.find(_name(names[i], group) for i in range(start, end))
            for group, start in enumerate(starts)
        ]

    def _reach(
        self,
        names: list[bytes],
        have: int,
        position: int | None,
        count: Callable[[Iterable[bytes]], int],
    ) -> tuple[int, list[int]]:
        """How many of the blocks `names` can be reused, and the first that each KV group takes;
        `count`: how many leading ones of some blocks are there.

        Groups with a window take those that the next token sees: the one after the reused blocks,
        or the one at `position`.
        """
        groups, end = self._blocks.groups, len(names)
        starts = [have] * len(groups)
        group = 0
        while group < len(groups):
            token = end * self._block_size if position is None else position
            first = groups[group].first_token(token) // self._block_size
            start = starts[group] = min(end, max(have, first))
            cached = count(_name(names[i], group) for i in range(end - 1, start - 1, -1))
            if cached == end - start:
                group += 1
            else:  # the block before the cached ones is missing: end there, and start again
                end, group = end - 1 - cached, 0
        return end, starts

    def with_host(self, sequence: Sequence) -> tuple[int, list[bytes]]:
        """How many leading blocks of a sequence could be reused with those that are in host memory,
        and their names: of each KV group those that it then needs."""
        tiers, names = self._tiers, self.reusable(sequence)
        if tiers is None:
            return 0, []

        def count(some: Iterable[bytes]) -> int:
            held = (tiers.slots.holds(name) or bool(self._blocks.find((name,))) for name in some)
            return sum(1 for _ in itertools.takewhile(bool, held))

        end, starts = self._reach(names, 0, None, count)
        return end, self._needed(names, end, starts)

    @staticmethod
    def _needed(names: list[bytes], end: int, starts: list[int]) -> list[bytes]:
        return [
            _name(names[number], group)
            for group, start in enumerate(starts)
            for number in range(start, end)
        ]

    def reusable(self, sequence: Sequence, received: int | None = None) -> list[bytes]:
        """Names of the blocks that may come from the cache."""
        if not self._enabled or (received is None and not sequence.reuses_prefix):
            return []
        end = len(sequence.tokens) - 1 if received is None else received
        return self._digests(sequence)[: end // self._block_size]

    def _digests(self, sequence: Sequence) -> list[bytes]:
        """Names of all full blocks. Only blocks filled by output tokens are hashed here; those of
        the prompt come with the request."""
        digests, size = sequence.digests, self._block_size
        if self._enabled and len(digests) < len(sequence.tokens) // size:
            seed = b"" if digests else chain_seed(self._fingerprint, sequence.submit.cache_salt)
            extend_chain(digests, sequence.tokens, block_size=size, seed=seed)
        return digests

    def _count(self, sequence: Sequence) -> None:
        """A preempted sequence that finds its own KV again counts no hit."""
        stats = sequence.stats
        if stats.num_preemptions:
            stats.num_cached_tokens = min(stats.num_cached_tokens, sequence.num_computed)
            return
        stats.num_cached_tokens = sequence.num_computed
        if self._enabled:
            self._num_queried += len(sequence.tokens)
            self._num_hit += sequence.num_computed


def _name(digest: bytes, group: int) -> bytes:
    """The name of a block of a KV group."""
    return digest + bytes((group,)) if group else digest


def hash_blocks(submit: Submit, fingerprint: KVFingerprint, block_size: int) -> tuple[bytes, ...]:
    """Names of the full blocks of a request's tokens, for `Submitted.digests`.

    Runs beside the step thread. A thread that only hashes would keep the interpreter lock from it
    for 5 ms at every operator of a step, so the lock is released every HASH_SLICE blocks.
    """
    digests: list[bytes] = []
    tokens = (*submit.prompt_ids, *submit.output_ids)
    seed = chain_seed(fingerprint, submit.cache_salt)
    num_full = len(tokens) // block_size
    while len(digests) < num_full:
        if digests:
            time.sleep(0)
        extend_chain(digests, tokens, block_size=block_size, seed=seed, max_blocks=HASH_SLICE)
    return tuple(digests)
