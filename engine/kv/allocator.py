"""States, references and content of KV blocks. Pure Python; each block has one state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice

from engine.kv.tables import BlockTables
from protocol.errors import Internal
from protocol.kv_layout import ONE_GROUP, KVGroup, pages_for


class BlockState(Enum):
    """State of a block."""

    FREE = "free"
    HELD = "held"  # at least one sequence refers to it
    CACHED = "cached"  # without references; its content is kept until room is needed
    QUARANTINED = "quarantined"  # a write to it may still be in flight


class BlockAllocator:
    """Allocates blocks, counts references and finds blocks by content. Not thread-safe.

    `name` gives the content of a block a name: a digest of all tokens up to the end of the block.
    Named blocks may be shared (`find`, `retain`) and are never written again. Without references
    they stay cached until room is needed: the least recently freed goes first.

    A call that contradicts the states (freeing a free block, quarantining a shared one, an id out
    of range or repeated) raises Internal and changes nothing.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: tuple[KVGroup, ...] = ONE_GROUP
    ) -> None:
        """`groups`: the KV groups that share the blocks (protocol.kv_layout)."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self.has_windows = any(group.window is not None for group in groups)
        self.has_one_chain = len(groups) == 1 and not self.has_windows
        self._states = [BlockState.FREE] * num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._num_quarantined = 0
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give without evicting cached ones."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return self._num_quarantined

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached) - self._num_quarantined

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens of one group."""
        return -(-num_tokens // self.block_size)

    def pages_for(self, num_tokens: int, chunk: int = 1) -> int:
        """The most blocks of all groups that a sequence holds at a time (kv_layout.pages_for)."""
        return pages_for(self.groups, self.block_size, num_tokens, chunk)

    def new_tables(self) -> BlockTables:
        """Empty tables for a sequence."""
        return BlockTables(self.groups, self.block_size)

    def allocate(self, n: int) -> list[int] | None:
        """`n` held blocks with one reference each, or None. Takes free blocks first, then cached
        ones, oldest first."""
        if n < 0:
            raise Internal(f"cannot allocate {n} blocks")
        if n > self.num_available:
            return None
        if len(self._free) < n:
            self._evict(n - len(self._free))
        states, references = self._states, self._references
        rest = len(self._free) - n
        taken = self._free[rest:]
        taken.reverse()
        del self._free[rest:]
        for block in taken:
            states[block] = BlockState.HELD
            references[block] = 1
        return taken

    def retain(self, ids: Sequence[int]) -> None:
        """Add a reference to held blocks; a cached block becomes held again."""
        self._expect(ids, (BlockState.HELD, BlockState.CACHED), "retain")
        states, references = self._states, self._references
        for block in ids:
            if states[block] is BlockState.CACHED:
                del self._cached[block]
                states[block] = BlockState.HELD
            references[block] += 1

    def free(self, ids: Sequence[int]) -> None:
        """Drop a reference to held blocks; the last one frees the block, or caches a named one.

        `ids` are in the order of their sequence: the last are evicted first, because no sequence
        can use a block without those before it.
        """
        self._expect(ids, (BlockState.HELD,), "free")
        states, references, names = self._states, self._references, self._names
        for block in reversed(ids):
            references[block] -= 1
            if references[block]:
                continue
            if block in names:
                states[block] = BlockState.CACHED
                self._cached[block] = None
            else:
                self._release(block)

    def name(self, ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Held blocks are full and final: they can be shared from now on. Of several blocks with
        the same content only the first is found."""
        self._expect(ids, (BlockState.HELD,), "name")
        names, named, changes = self._names, self._named, self._changes
        together = list(zip(ids, digests, strict=True))
        if not names.keys().isdisjoint(ids):
            for block, digest in together:
                if names.get(block, digest) != digest:
                    raise Internal(f"cannot name block {block} twice")
        for block, digest in together:
            if digest not in named:
                names[block] = digest
                named[digest] = block
                changes[digest] = True

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the first `digests`, up to one that is missing. The next `allocate` may
        evict them unless they are retained."""
        found: list[int] = []
        for block in map(self._named.get, digests):
            if block is None:
                break
            found.append(block)
        return found

    def forget(self, ids: Iterable[int]) -> None:
        """Remove the names of held blocks whose content must not be reused."""
        for block in ids:
            self._drop_name(block)

    def take_changes(self) -> dict[bytes, bool]:
        """Digests that were added (True) or removed (False) since the last call."""
        changes, self._changes = self._changes, {}
        return changes

    def quarantine(self, ids: Sequence[int]) -> None:
        """Take held blocks with a single reference out of use until `unquarantine`."""
        self._expect(ids, (BlockState.HELD,), "quarantine")
        shared = [block for block in ids if self._references[block] != 1]
        if shared:
            raise Internal(f"cannot quarantine shared blocks {shared}")
        for block in ids:
            self._drop_name(block)
            self._references[block] = 0
            self._states[block] = BlockState.QUARANTINED
        self._num_quarantined += len(ids)

    def unquarantine(self, ids: Sequence[int]) -> None:
        """Free quarantined blocks: no write to them is in flight any more."""
        self._expect(ids, (BlockState.QUARANTINED,), "unquarantine")
        for block in ids:
            self._release(block)
        self._num_quarantined -= len(ids)

    def count_cached(self, ids: Iterable[int]) -> int:
        """How many of these blocks are cached."""
        return sum(map(self._cached.__contains__, ids))

    def is_held(self, block: int) -> bool:
        return self._states[block] is BlockState.HELD

    def num_references(self, block: int) -> int:
        return self._references[block]

    def references(self) -> dict[int, int]:
        """Held blocks, with the number of references to each."""
        return {block: count for block, count in enumerate(self._references) if count}

    def check(self) -> None:
        """Raise Internal unless states, references, lists and names agree."""
        count = {state: self._states.count(state) for state in BlockState}
        free = set(self._free)
        sound = (
            len(free) == len(self._free) == count[BlockState.FREE]
            and len(self._cached) == count[BlockState.CACHED]
            and self._num_quarantined == count[BlockState.QUARANTINED]
            and all(self._states[block] is BlockState.FREE for block in free)
            and all(self._states[block] is BlockState.CACHED for block in self._cached)
            and all(
                (references > 0) == (state is BlockState.HELD)
                for references, state in zip(self._references, self._states, strict=True)
            )
            and self._named == {digest: block for block, digest in self._names.items()}
            and all(
                self._states[block] is BlockState.HELD or block in self._cached
                for block in self._names
            )
            and all(block in self._names for block in self._cached)
        )
        if not sound:
            raise Internal(
                f"block accounts do not add up: {self.num_free} free, {self.num_held} held, "
                f"{self.num_cached} cached, {self.num_quarantined} quarantined of {self.num_blocks}"
            )

    def _evict(self, n: int) -> None:
        """Free the `n` oldest cached blocks, all of which have names."""
        evicted = list(islice(self._cached, n))
        for block in evicted:
            del self._cached[block]
            digest = self._names.pop(block)
            del self._named[digest]
            self._changes[digest] = False
            self._states[block] = BlockState.FREE
        self._free += evicted

    def _drop_name(self, block: int) -> None:
        digest = self._names.pop(block, None)
        if digest is not None:
            del self._named[digest]
            self._changes[digest] = False

    def _release(self, block: int) -> None:
        self._states[block] = BlockState.FREE
        self._free.append(block)

    def _expect(self, ids: Sequence[int], allowed: tuple[BlockState, ...], action: str) -> None:
        if not ids:
            return
        if min(ids) >= 0 and max(ids) < self.num_blocks and len(set(ids)) == len(ids):
            states = list(map(self._states.__getitem__, ids))
            if sum(map(states.count, allowed)) == len(ids):
                return
        seen = set()
        for block in ids:
            if not 0 <= block < self.num_blocks:
                raise Internal(f"cannot {action} block {block} of {self.num_blocks}")
            if block in seen:
                raise Internal(f"cannot {action} block {block} twice in one call")
            if self._states[block] not in allowed:
                raise Internal(f"cannot {action} block {block}: it is {self._states[block].value}")
            seen.add(block)
