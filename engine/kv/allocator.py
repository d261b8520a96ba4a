"""States, references and content of KV blocks. Pure Python; each block has one state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from itertools import islice

from engine.kv.tables import BlockTables
from protocol.errors import Internal
from protocol.kv_layout import ONE_GROUP, KVGroup, pages_for


class BlockAllocator:
    """Allocates blocks, counts references and finds blocks by content. Not thread-safe.

    A block is free; held: at least one sequence refers to it; cached: without references, its
    content is kept until room is needed; or quarantined: a write to it may still be in flight.

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
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references: dict[int, int] = {}  # of held blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._quarantined: set[int] = set()
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
        return len(self._quarantined)

    @property
    def num_held(self) -> int:
        return len(self._references)

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
        rest = len(self._free) - n
        taken = self._free[rest:]
        taken.reverse()
        del self._free[rest:]
        self._references.update(dict.fromkeys(taken, 1))
        return taken

    def retain(self, ids: Sequence[int]) -> None:
        """Add a reference to held blocks; a cached block becomes held again."""
        references, cached = self._references, self._cached
        self._expect(ids, "retain", cached, references)
        back = [block for block in ids if block in cached]
        if len(back) < len(ids):
            held = [block for block in ids if block in references]
            references.update((block, references[block] + 1) for block in held)
        for block in back:
            del cached[block]
        references.update(dict.fromkeys(back, 1))

    def free(self, ids: Sequence[int]) -> None:
        """Drop a reference to held blocks; the last one frees the block, or caches a named one.

        `ids` are in the order of their sequence: the last are evicted first, because no sequence
        can use a block without those before it.
        """
        references, names, cached = self._references, self._names, self._cached
        self._expect(ids, "free", references)
        last = ids[::-1]
        counts = list(map(references.pop, last))
        if counts.count(1) < len(counts):
            left = zip(last, counts, strict=True)
            references.update((block, count - 1) for block, count in left if count > 1)
            last = [block for block in last if block not in references]
        for block in last:
            if block in names:
                cached[block] = None
            else:
                self._free.append(block)

    def name(self, ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Held blocks are full and final: they can be shared from now on. Of several blocks with
        the same content only the first is found."""
        self._expect(ids, "name", self._references)
        names, named = self._names, self._named
        if len(digests) != len(ids):
            raise Internal(f"{len(digests)} names for {len(ids)} blocks")
        if not names.keys().isdisjoint(ids):
            for block, digest in zip(ids, digests, strict=True):
                if names.get(block, digest) != digest:
                    raise Internal(f"cannot name block {block} twice")
        if not named.keys().isdisjoint(digests) or len(set(digests)) < len(digests):
            first = dict(zip(reversed(digests), reversed(ids), strict=True))
            fresh = {digest: block for digest, block in first.items() if digest not in named}
            digests, ids = list(fresh), list(fresh.values())
        named.update(zip(digests, ids, strict=True))
        names.update(zip(ids, digests, strict=True))
        self._changes.update(dict.fromkeys(digests, True))

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the first `digests`, up to one that is missing. The next `allocate` may
        evict them unless they are retained."""
        found: list[int] = []
        with suppress(KeyError):
            found.extend(map(self._named.__getitem__, digests))
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
        self._expect(ids, "quarantine", self._references)
        shared = [block for block in ids if self._references[block] != 1]
        if shared:
            raise Internal(f"cannot quarantine shared blocks {shared}")
        for block in ids:
            self._drop_name(block)
            del self._references[block]
        self._quarantined.update(ids)

    def unquarantine(self, ids: Sequence[int]) -> None:
        """Free quarantined blocks: no write to them is in flight any more."""
        self._expect(ids, "unquarantine", self._quarantined)
        self._quarantined.difference_update(ids)
        self._free += ids

    def count_cached(self, ids: Iterable[int]) -> int:
        """How many of these blocks are cached."""
        return sum(map(self._cached.__contains__, ids))

    def num_references(self, block: int) -> int:
        return self._references.get(block, 0)

    def _evict(self, n: int) -> None:
        """Free the `n` oldest cached blocks, all of which have names."""
        evicted = list(islice(self._cached, n))
        digests = list(map(self._names.pop, evicted))
        for block, digest in zip(evicted, digests, strict=True):
            del self._cached[block], self._named[digest]
        self._changes.update(dict.fromkeys(digests, False))
        self._free += evicted

    def _drop_name(self, block: int) -> None:
        digest = self._names.pop(block, None)
        if digest is not None:
            del self._named[digest]
            self._changes[digest] = False

    def _expect(self, ids: Sequence[int], action: str, *allowed: Container[int]) -> None:
        """Raise Internal unless these are different blocks, each in a state that is `allowed`."""
        missing = len(ids) if len(set(ids)) == len(ids) else -1
        for state in allowed:
            if missing > 0:
                missing -= sum(map(state.__contains__, ids))
        if not missing:
            return
        seen = set()
        for block in ids:
            if not 0 <= block < self.num_blocks:
                raise Internal(f"cannot {action} block {block} of {self.num_blocks}")
            if block in seen:
                raise Internal(f"cannot {action} block {block} twice in one call")
            if not any(block in state for state in allowed):
                raise Internal(f"cannot {action} block {block}: it is in another state")
            seen.add(block)
