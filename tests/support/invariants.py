"""What holds of schedulers, sequences, blocks and KV tiers before and after every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from decode_worker.lifecycle import DecodeEntry
from engine.kv.allocator import BlockAllocator
from kv_tiers.commands import CopyKind
from kv_tiers.slots import HostSlots, SlotState
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.entry import RequestState, SchedulerEntry
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.peer_blocks import PeerBlocks
from worker_runtime.scheduling.scheduler import Scheduler
from worker_runtime.scheduling.sequence import Sequence


def check_scheduler(scheduler: Scheduler[Any] | BothRoles) -> None:
    """Every held block has exactly the references that entries, copies and loans have to it."""
    blocks = scheduler._blocks
    check_blocks(blocks)
    references: Counter[int] = Counter()
    if isinstance(scheduler, Scheduler):
        references += _entry_references(scheduler)
    else:
        for each in scheduler._all:
            references += _entry_references(each)
        if scheduler._tiers is not None:
            check_tiers(scheduler._tiers)
            references += scheduler._tiers.copies.leases
        if scheduler._peers is not None:
            references += _loan_references(scheduler._peers)
    assert references == blocks._references


def _entry_references(scheduler: Scheduler[Any]) -> Counter[int]:
    blocks, rows = scheduler._blocks, list(scheduler._inflight.rows())
    gone = {id(row.entry): row.entry for row in rows}
    for entry in scheduler._entries.values():
        assert entry.state is not RequestState.GONE
        gone.pop(id(entry), None)
    assert all(entry.state is RequestState.GONE for entry in gone.values())
    references: Counter[int] = Counter()
    for entry in (*scheduler._entries.values(), *gone.values()):
        sequence = entry.sequence
        check_sequence(sequence, blocks.block_size)
        in_flight = sum(row.num_tokens for row in rows if row.entry is entry)
        assert in_flight == sequence.num_launched - sequence.num_computed, sequence.key
        held = [block for block in sequence.tables.blocks() if blocks.num_references(block)]
        assert not held or in_flight or may_hold_blocks(entry), entry
        references.update(held)
    return references


def may_hold_blocks(entry: SchedulerEntry) -> bool:
    """Whether its tables may refer to held blocks with no step in flight."""
    sends = isinstance(entry, DecodeEntry) and entry.ending and entry.departure is not None
    return sends or entry.state not in entry.without_blocks


def check_sequence(sequence: Sequence, block_size: int) -> None:
    launched, num_tokens = sequence.num_launched, len(sequence.tokens)
    assert 0 <= sequence.num_computed <= launched <= num_tokens + sequence.num_pending
    assert sequence.num_pending <= 2, sequence.num_pending
    assert sequence.loading is None or not sequence.in_flight
    assert not sequence.in_flight or sequence.tables.holds(sequence.num_computed, launched)
    assert sequence.tables or not sequence.num_computed
    blocks = sequence.tables.blocks()
    assert len(set(blocks)) == len(blocks), blocks
    assert len(sequence.digests) <= num_tokens // block_size


def check_blocks(blocks: BlockAllocator) -> None:
    """States, references and names of blocks agree."""
    states = (blocks._free, blocks._references, blocks._cached, blocks._quarantined)
    assert sum(map(len, states)) == blocks.num_blocks
    assert set().union(*states) == set(range(blocks.num_blocks))
    assert all(count > 0 for count in blocks._references.values())
    assert blocks._named == {digest: block for block, digest in blocks._names.items()}
    assert all(block in blocks._references or block in blocks._cached for block in blocks._names)
    assert all(block in blocks._names for block in blocks._cached)


def check_tiers(tiers: KVTiers) -> None:
    """Leases and copies in flight agree."""
    check_slots(tiers.slots)
    runs = tiers.copies.running.values()
    assert Counter(block for run in runs for block in run.copy.blocks) == tiers.copies.leases
    stores = [run for run in runs if run.copy.kind is CopyKind.STORE]
    assert tiers._num_storing == sum(len(run.stores) for run in stores)
    assert tiers.slots.num_leased == len({slot for run in runs for slot in run.copy.slots})
    for load in tiers._loads:
        assert load.num_loading == len(tiers.copies.of(load, CopyKind.LOAD))


def check_slots(slots: HostSlots) -> None:
    """States, names and leases agree."""
    free, states = set(slots._free), slots._states
    used = set(range(slots.num_slots)) - free
    named = {slot for slot in used if states[slot] is not SlotState.DOOMED}
    assert len(free) == len(slots._free)
    assert all(states[slot] is SlotState.FREE for slot in free)
    assert all(states[slot] is not SlotState.FREE for slot in used)
    assert named == slots._names.keys()
    assert slots._slots == {name: slot for slot, name in slots._names.items()}
    assert slots._leases.keys() <= used
    assert slots._usual.keys() | slots._kept.keys() == slots._slots.keys()
    assert not slots._usual.keys() & slots._kept.keys()
    assert all(states[slot] is SlotState.READY or slot in slots._leases for slot in used)


def _loan_references(peers: PeerBlocks) -> Counter[int]:
    parts = (*peers._loans.values(), *peers._borrowed.values())
    blocks = (block for found in parts for block in found.part.tables.blocks())
    return Counter(block for block in blocks if peers._blocks.num_references(block))


def loan_holder(peers: PeerBlocks, key: Any) -> Sequence | None:
    """What has the blocks of a loan."""
    found = peers._loans.get(key) or peers._borrowed.get(key)
    return None if found is None else found.part
