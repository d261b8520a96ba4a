"""What is copied between the pool, host memory and files, and when. Pure: the step thread owns it;
the copies of `take_copies` run elsewhere, and `done` takes their results.

A store leases its block, a load its slot and its block, until every rank has ended the copy. So a
block that is evicted, cancelled or preempted meanwhile is not reused before.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from engine.kv.allocator import BlockAllocator
from kv_tiers.commands import Copy, CopyKind, CopyResult, Tier
from kv_tiers.cost import TierCosts, cheapest, patience_s
from kv_tiers.slots import HostSlots
from observability import metrics
from observability.metrics import counter_key
from protocol.kv_layout import DIGEST_BYTES
from protocol.loads import TierLoad
from protocol.timeline import Phase
from worker_runtime.scheduling.kv_copies import KVCopies, RunningCopy, Store
from worker_runtime.scheduling.messages import TierCounters
from worker_runtime.scheduling.sequence import KVLoad, Sequence

#: Seconds that tokens start .. end - 1 of a prompt take to compute; 0 when unknown.
ComputeSeconds = Callable[[int, int], float]
#: Bytes of blocks that stores may lease at a time, and the share of the pool.
_STORING_BYTES = 64 << 20
_STORING_SHARE = 16
#: Bytes that one copy into the pool moves at most.
_LOAD_BYTES = 512 << 20


class KVTiers:
    """The lower tiers of one worker."""

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        num_slots: int,
        slot_bytes: int,
        segment_blocks: int,
        num_ranks: int = 1,
        disk_bytes: int = 0,
    ) -> None:
        """`slot_bytes`: of a slot on the rank with the most. `segment_blocks`: of a file; 0: no
        files. `num_ranks`, `disk_bytes`: for reports only."""
        self._blocks = blocks
        self.slots = HostSlots(num_slots)
        self.slot_bytes = slot_bytes
        self._segment_blocks = segment_blocks
        self._num_ranks = num_ranks
        self._disk_bytes = disk_bytes
        self._now = 0.0  # as of the last plan
        self._pending: deque[Store] = deque(maxlen=2 * blocks.num_blocks)
        self._max_storing = max(
            1, min(blocks.num_blocks // _STORING_SHARE, _STORING_BYTES // slot_bytes)
        )
        self._num_storing = 0
        self._num_writing = 0  # slots
        self.copies = KVCopies(blocks)
        self._loads: list[KVLoad] = []
        self._coming: dict[bytes, KVLoad] = {}
        self._on_disk: set[bytes] = set()
        self._dropped: set[bytes] = set()  # a listing may still show them
        self.costs = TierCosts(slot_bytes)
        self.counters = TierCounters()

    # --- stores ---------------------------------------------------------------------------------

    def published(self, digests: list[bytes], first: int, ids: Iterable[int]) -> None:
        """Blocks first, first + 1, ... of a chain were named."""
        size = self._segment_blocks
        for number, block in enumerate(ids, first):
            if self.slots.knows(digests[number]):
                continue
            whole = bool(size) and (number + 1) % size == 0
            segment = tuple(digests[number + 1 - size : number + 1]) if whole else ()
            self._pending.append(Store(digests[number], block, segment))

    def num_held(self, names: list[bytes]) -> int:
        """How many leading blocks are in host memory."""
        return next((i for i, n in enumerate(names) if not self.slots.holds(n)), len(names))

    def forget(self, names: list[bytes]) -> None:
        """The content of these blocks must not be used again."""
        self.slots.forget(names)
        for name in names:
            if name in self._on_disk:
                self._on_disk.discard(name)
                self._dropped.add(name)
                self.copies.start(CopyKind.DROP, slots=(), file=(name, 0))

    def take_copies(self) -> list[Copy]:
        """The copies to start now."""
        self._store()
        return self.copies.take_new()

    def _store(self) -> None:
        stores, slots = [], []
        while self._pending and self._num_storing < self._max_storing:
            store = self._pending.popleft()
            if self.slots.knows(store.name) or self._blocks.find((store.name,)) != [store.block]:
                continue  # evicted meanwhile
            slot = self.slots.reserve(store.name, self._now)
            if slot is None:
                self.counters.refuse(Tier.HOST, "full")
                continue
            stores.append(store)
            slots.append(slot)
            self._num_storing += 1
        if stores:
            blocks = [store.block for store in stores]
            self.copies.start(CopyKind.STORE, blocks=blocks, slots=slots, stores=tuple(stores))

    def _stored(self, run: RunningCopy, result: CopyResult) -> None:
        for slot in run.copy.slots:
            self.slots.filled(slot, ok=result.ok)
        self.slots.release(run.copy.slots)
        self.copies.release(run.copy)
        self._num_storing -= len(run.copy.blocks)
        for store in run.stores:
            self._write(store.segment)

    def _write(self, segment: tuple[bytes, ...]) -> None:
        """Write a segment to disk if all of it is in host memory."""
        if not segment or segment[-1] in self._on_disk or not all(map(self.slots.holds, segment)):
            return
        if self._num_writing + len(segment) > max(len(segment), self.slots.num_slots // 4):
            self.counters.refuse(Tier.DISK, "full")  # a disk that hangs must not lease all slots
        else:
            slots = self.slots.lease(segment)
            self._num_writing += len(slots)
            self._on_disk.add(segment[-1])
            self._dropped.discard(segment[-1])
            self.copies.start(CopyKind.WRITE, slots=slots, file=(segment[-1], 0))

    # --- loads ----------------------------------------------------------------------------------

    def load_ahead(
        self, sequence: Sequence, names: list[bytes], now: float, compute_s: ComputeSeconds
    ) -> None:
        """Bring blocks `names` after those that a sequence has, as many as are cheaper to load than
        to compute; sets `loading`. It has blocks for them and no step in flight."""
        have = sequence.num_computed // self._blocks.block_size
        coming = self._coming.get(names[have]) if have < len(names) else None
        if coming is not None:
            coming.waiting.append(sequence)
            sequence.loading = coming
            return
        tiers = self._sources(names, have)
        end = self._choose(sequence, tiers, have, now, compute_s)
        if end > have:
            size = self._blocks.block_size
            spared_s = compute_s(have * size, end * size) or math.inf
            self._load(sequence, names[have:end], tiers[: end - have], now, spared_s)

    def _sources(self, names: list[bytes], have: int) -> list[Tier]:
        """Where blocks `have`, ... are, up to one that is nowhere."""
        tiers = []
        size, num_read = self._segment_blocks, 0
        for number in range(have, len(names)):
            if names[number] in self._coming:
                break
            if self.slots.holds(names[number]):
                tiers.append(Tier.HOST)
                continue
            last = (number // size + 1) * size - 1 if size else len(names)
            if last >= len(names) or names[last] not in self._on_disk:
                break
            num_read += 1
            if self.slots.knows(names[number]) or num_read > self.slots.num_slots // 2:
                break
            tiers.append(Tier.DISK)
        return tiers

    def _choose(
        self,
        sequence: Sequence,
        tiers: list[Tier],
        have: int,
        now: float,
        compute_s: ComputeSeconds,
    ) -> int:
        """How many leading blocks it should have before it computes."""
        if not tiers:
            return have
        candidates = self.costs.candidates(tiers, have, now)
        size, num_tokens = self._blocks.block_size, len(sequence.tokens)
        best = cheapest(candidates, lambda count: compute_s(count * size, num_tokens))
        if best.num_blocks < have + len(tiers):
            reason = "hangs" if candidates[-1].seconds == math.inf else "cost"
            self.counters.refuse(tiers[-1], reason)
        return best.num_blocks

    def expected_s(
        self, names: list[bytes], have: int, num_tokens: int, now: float, compute_s: ComputeSeconds
    ) -> float:
        """Seconds until a sequence with its first `have` blocks could have computed its tokens; 0
        when unknown."""
        size, found = self._blocks.block_size, self._sources(names, have)
        return min(
            each.seconds + compute_s(each.num_blocks * size, num_tokens)
            for each in self.costs.candidates(found, have, now)
        )

    def _load(
        self,
        sequence: Sequence,
        names: list[bytes],
        tiers: list[Tier],
        now: float,
        spared_s: float,
    ) -> None:
        """`spared_s`: what computing these blocks would take."""
        first = sequence.num_computed // self._blocks.block_size
        load_s = self.costs.load_s(tiers, now)
        load = KVLoad(
            sequence=sequence,
            first=first,
            names=names,
            blocks=sequence.tables.ids[0][first : first + len(names)],
            tiers=tiers,
            here=[False] * len(names),
            end=len(names),
            began=now,
            cut_at=now + min(spared_s, patience_s(load_s)),
        )
        sequence.loading = load
        sequence.stats.begin(Phase.KV_LOAD, now)
        self._loads.append(load)
        self._coming.update(dict.fromkeys(names, load))
        parts = load.parts(self._segment_blocks, max(1, _LOAD_BYTES // self.slot_bytes))
        # What is here is leased before room is made for what is not.
        for begin, end in parts:
            if tiers[begin] is Tier.HOST:
                self._fill(load, begin, self.slots.lease(names[begin:end]), now)
        for begin, end in parts:
            if tiers[begin] is Tier.DISK:
                self._read(load, begin, end, now)
        self._finish_if_over(load, now)

    def _read(self, load: KVLoad, begin: int, end: int, now: float) -> None:
        """Read a part of a file into slots; without room nothing from there on is loaded."""
        if begin >= load.end:
            return
        slots: list[int] = []
        for name in load.names[begin:end]:
            slot = self.slots.reserve(name, now)
            if slot is None:
                self.counters.refuse(Tier.DISK, "full")
                for unused in slots:
                    self.slots.filled(unused, ok=False)
                self.slots.release(slots)
                load.end = min(load.end, begin)
                return
            slots.append(slot)
        file = load.file_of(begin, self._segment_blocks)
        copy = self.copies.start(CopyKind.READ, slots=slots, file=file, part=(load, begin))
        self.costs.rates[Tier.DISK].begin(copy.number, len(slots) * self.slot_bytes, now)

    def _fill(self, load: KVLoad, begin: int, slots: list[int], now: float) -> None:
        """Copy leased slots into the blocks from place `begin` on."""
        blocks = load.blocks[begin : begin + len(slots)]
        load.num_loading += 1
        copy = self.copies.start(CopyKind.LOAD, blocks=blocks, slots=slots, part=(load, begin))
        self.costs.rates[Tier.HOST].begin(copy.number, len(slots) * self.slot_bytes, now)

    # --- results --------------------------------------------------------------------------------

    def done(self, number: int, result: CopyResult, now: float) -> list[Sequence]:
        """A copy has ended on every rank. Returns sequences that waited for a load of another."""
        run = self.copies.running.pop(number)
        kind = run.copy.kind
        self.counters.copied(kind, result)
        if kind is CopyKind.STORE:
            self._stored(run, result)
        elif kind is CopyKind.WRITE:
            self.slots.release(run.copy.slots)
            self._num_writing -= len(run.copy.slots)
            if not result.ok:
                self._on_disk.discard(run.copy.name)
        elif kind is CopyKind.LOAD and run.load is None:
            self._fetched(run, result, now)
        elif run.load is not None:
            if kind is CopyKind.READ:
                self._was_read(run, run.load, result, now)
            else:
                self._filled(run, run.load, result, now)
            return self._finish_if_over(run.load, now)
        return []

    def _fetched(self, run: RunningCopy, result: CopyResult, now: float) -> None:
        """Blocks have come for sequences that have none yet (kv_prefetch)."""
        self.costs.rates[Tier.HOST].end(run.copy.number, result.seconds, now, ok=result.ok)
        self.slots.release(run.copy.slots)
        if result.ok:
            self._blocks.name([s.block for s in run.stores], [s.name for s in run.stores])
        self.copies.release(run.copy)

    def _was_read(self, run: RunningCopy, load: KVLoad, result: CopyResult, now: float) -> None:
        slots = list(run.copy.slots)
        self.costs.rates[Tier.DISK].end(run.copy.number, result.seconds, now, ok=result.ok)
        for slot in slots:
            self.slots.filled(slot, ok=result.ok)
        if not result.ok:
            self._on_disk.discard(run.copy.name)
            load.end = min(load.end, run.at)
        if result.ok and load.wanted and run.at < load.end:
            self._fill(load, run.at, slots, now)
        else:
            self.slots.release(slots)

    def _filled(self, run: RunningCopy, load: KVLoad, result: CopyResult, now: float) -> None:
        self.costs.rates[Tier.HOST].end(run.copy.number, result.seconds, now, ok=result.ok)
        self.slots.release(run.copy.slots)
        load.num_loading -= 1
        if result.ok:
            part = slice(run.at, run.at + len(run.copy.blocks))
            load.here[part] = [True] * len(run.copy.blocks)
            if not load.wanted:  # else it may still have to compute what is before
                self._blocks.name(load.blocks[part], load.names[part])
        else:
            load.end = min(load.end, run.at)
        self.copies.release(run.copy)

    def expire(self, now: float) -> list[Sequence]:
        """Give up what files have not brought in time. Returns sequences that waited for it."""
        self._now = now
        over: list[Sequence] = []
        for load in [load for load in self._loads if load.cut_at <= now]:
            late = [run.at for run in self.copies.of(load, CopyKind.READ)]
            if late and load.wanted:
                load.end = min(load.end, *late)
                self.counters.refuse(Tier.DISK, "late")
            load.cut_at = math.inf
            over += self._finish_if_over(load, now)
        return over

    def next_deadline(self) -> float:
        return min((load.cut_at for load in self._loads), default=math.inf)

    def _finish_if_over(self, load: KVLoad, now: float) -> list[Sequence]:
        if not load.over or load not in self._loads:
            return []
        self._loads.remove(load)
        for name in load.names:
            self._coming.pop(name, None)
        for sequence in load.waiting:
            sequence.loading = None
        if load.wanted:
            load.sequence.loading = None
            count, size = min(load.num_here, load.end), self._blocks.block_size
            end = (load.first + count) * size
            self._blocks.name(load.blocks[:count], load.names[:count])
            load.sequence.loaded(end, Counter(load.tiers[:count]), size, now)
            self.counters.hit(load.tiers[:count], size)
        return load.waiting

    # --- views ----------------------------------------------------------------------------------

    def listed(self, names: frozenset[bytes], bytes_per_second: float, now: float) -> None:
        """These segments are on disk, which was just measured, or not (0)."""
        self._on_disk = set(names - self._dropped)
        if bytes_per_second:
            self.costs.rates[Tier.DISK].probed(bytes_per_second, now)

    @property
    def idle(self) -> bool:
        """Whether no copy is in flight or waits."""
        return not self.copies.running and not self._pending

    def changes(self, pool: Mapping[bytes, bool]) -> dict[bytes, bool]:
        """Names that the worker has gained (True) or lost (False), in its pool, whose changes are
        given, or in host memory."""
        names = {**pool, **self.slots.take_changes()}
        return {
            name: self.slots.holds(name) or bool(self._blocks.find((name,)))
            for name in names
            if len(name) == DIGEST_BYTES  # of the first KV group
        }

    def load(self) -> tuple[TierLoad, ...]:
        """Room and speed of each tier."""
        size = self.slot_bytes * self._num_ranks
        host = self.slots.num_used * size, self.slots.num_slots * size
        disk = len(self._on_disk) * self._segment_blocks * size, self._disk_bytes
        return tuple(
            TierLoad(
                tier=tier.value,
                used_bytes=used,
                total_bytes=total,
                bytes_per_second=self.costs.rates[tier].measured * self._num_ranks,
            )
            for tier, (used, total) in ((Tier.HOST, host), (Tier.DISK, disk))
            if total
        )

    def counts(self) -> dict[str, int]:
        """Counters since the start."""
        key = counter_key(metrics.KV_TIER_EVICTIONS, tier=Tier.HOST.value)
        return {**self.counters.read(), key: self.slots.num_evicted}
