"""Block accounts: whatever is called, every block is in exactly one state."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.kv.allocator import BlockAllocator
from protocol.errors import Internal
from tests.support.invariants import check_blocks

DIGESTS = [bytes([i]) * 32 for i in range(6)]


class Accounts(RuleBasedStateMachine):
    """Random calls, checked against sets kept beside the allocator."""

    held = Bundle("held")
    quarantined = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(12, 4)
        self.references: dict[int, int] = {}
        self.cached: list[int] = []
        self.set_aside: set[int] = set()
        self.names: dict[bytes, int] = {}
        self.published: set[bytes] = set()

    def forget(self, blocks):
        self.names = {d: block for d, block in self.names.items() if block not in blocks}

    @rule(target=held, n=st.integers(0, 6))
    def allocate(self, n):
        room = 12 - len(self.references) - len(self.set_aside)
        assert self.blocks.num_available == room
        ids = self.blocks.allocate(n)
        if n > room:
            assert ids is None
            return ()
        assert ids is not None
        assert len(set(ids)) == n
        assert not set(ids) & (set(self.references) | self.set_aside)
        evicted = set(ids) & set(self.cached)
        assert evicted == set(self.cached[: len(evicted)]), "the oldest cached blocks go first"
        assert not evicted or not self.blocks.num_free, "while others are free none is evicted"
        self.cached = [block for block in self.cached if block not in evicted]
        self.forget(evicted)
        self.references |= dict.fromkeys(ids, 1)
        return tuple(ids)

    @rule(target=held, ids=held)
    def share(self, ids):
        if not all(block in self.references for block in ids):
            return ()
        self.blocks.retain(ids)
        for block in ids:
            self.references[block] += 1
        return ids

    @rule(ids=held, digests=st.permutations(DIGESTS))
    def name(self, ids, digests):
        ids, digests = ids[: len(digests)], digests[: len(ids)]
        if not all(block in self.references for block in ids):
            return
        pairs = list(zip(ids, digests, strict=True))
        own = {block: digest for digest, block in self.names.items()}
        if any(own.get(block, digest) != digest for block, digest in pairs):
            with pytest.raises(Internal):
                self.blocks.name(ids, digests)
            return
        self.blocks.name(ids, digests)
        for block, digest in pairs:
            self.names.setdefault(digest, block)

    @rule(ids=consumes(held))
    def free(self, ids):
        self.blocks.free(ids)
        for block in reversed(ids):
            self.references[block] -= 1
            if self.references[block] == 0:
                del self.references[block]
                if block in self.names.values():
                    self.cached.append(block)

    @rule(target=held, chain=st.lists(st.sampled_from(DIGESTS), unique=True))
    def reuse(self, chain):
        found = self.blocks.find(chain)
        assert found == [self.names[d] for d in chain[: len(found)]]
        assert len(found) == len(chain) or chain[len(found)] not in self.names
        self.blocks.retain(found)
        for block in found:
            self.references[block] = self.references.get(block, 0) + 1
        self.cached = [block for block in self.cached if block not in found]
        return tuple(found)

    @rule(target=quarantined, ids=consumes(held))
    def quarantine(self, ids):
        if any(self.references[block] > 1 for block in ids):
            with pytest.raises(Internal):
                self.blocks.quarantine(ids)
            self.free(ids)
            return ()
        self.blocks.quarantine(ids)
        for block in ids:
            del self.references[block]
        self.set_aside |= set(ids)
        self.forget(set(ids))
        return ids

    @rule(ids=consumes(quarantined))
    def unquarantine(self, ids):
        self.blocks.unquarantine(ids)
        self.set_aside -= set(ids)

    @rule()
    def publish(self):
        for digest, here in self.blocks.take_changes().items():
            (self.published.add if here else self.published.discard)(digest)
        assert self.published == set(self.names)

    @invariant()
    def accounts_add_up(self):
        blocks = self.blocks
        check_blocks(blocks)
        assert blocks.num_held == len(self.references)
        assert blocks.num_cached == len(self.cached)
        assert blocks.num_quarantined == len(self.set_aside)
        total = blocks.num_free + blocks.num_held + blocks.num_cached + blocks.num_quarantined
        assert total == blocks.num_blocks
        assert all(blocks.num_references(b) == n for b, n in self.references.items())


TestAccounts = Accounts.TestCase


@pytest.mark.parametrize(
    "wrong",
    [
        lambda blocks, ids: blocks.free([5]),
        lambda blocks, ids: blocks.free([ids[0], ids[0]]),
        lambda blocks, ids: blocks.free([99]),
        lambda blocks, ids: blocks.free([-1]),
        lambda blocks, ids: blocks.retain([5]),
        lambda blocks, ids: blocks.quarantine([5]),
        lambda blocks, ids: blocks.unquarantine(ids),
        lambda blocks, ids: blocks.allocate(-1),
        lambda blocks, ids: blocks.retain([ids[0], 5]),
        lambda blocks, ids: blocks.name(ids, DIGESTS[:2]),
        lambda blocks, ids: blocks.name([ids[0], 5], DIGESTS[:2]),
    ],
)
def test_a_wrong_call_raises_and_changes_nothing(wrong):
    blocks = BlockAllocator(6, 4)
    ids = blocks.allocate(3)
    assert ids == [0, 1, 2]
    with pytest.raises(Internal):
        wrong(blocks, ids)
    check_blocks(blocks)
    assert (blocks.num_free, blocks.num_held) == (3, 3)


def test_of_one_sequence_the_last_block_is_evicted_first():
    blocks = BlockAllocator(4, 4)
    old = blocks.allocate(3)
    blocks.name(old, DIGESTS[:3])
    blocks.free(old)
    assert (blocks.num_free, blocks.num_cached) == (1, 3)
    blocks.allocate(2)
    assert blocks.find(DIGESTS) == old[:2]


@pytest.mark.parametrize("together", [False, True])
def test_the_same_content_twice_is_found_once_and_the_copy_is_not_kept(together):
    blocks = BlockAllocator(4, 4)
    first, second = blocks.allocate(2)
    if together:
        blocks.name([first, second], [DIGESTS[0]] * 2)
    else:
        blocks.name([first], [DIGESTS[0]])
        blocks.name([second], [DIGESTS[0]])
    assert blocks.take_changes() == {DIGESTS[0]: True}
    check_blocks(blocks)
    blocks.free([first, second])
    assert blocks.find(DIGESTS[:1]) == [first]
    assert (blocks.num_free, blocks.num_cached) == (3, 1)


def test_one_call_takes_back_cached_blocks_and_shares_held_ones():
    blocks = BlockAllocator(6, 4)
    ids = blocks.allocate(4)
    blocks.name(ids, DIGESTS[:4])
    blocks.free(ids[2:])
    blocks.retain(ids)
    assert blocks._references == {ids[0]: 2, ids[1]: 2, ids[2]: 1, ids[3]: 1}
    blocks.free(ids)
    assert blocks._references == {ids[0]: 1, ids[1]: 1}
    assert (blocks.num_cached, blocks.find(DIGESTS)) == (2, ids)
    check_blocks(blocks)


def test_check_finds_a_lost_block():
    blocks = BlockAllocator(4, 4)
    blocks._free.pop()
    with pytest.raises(AssertionError):
        check_blocks(blocks)


def test_blocks_for_rounds_up():
    blocks = BlockAllocator(4, 16)
    assert [blocks.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
