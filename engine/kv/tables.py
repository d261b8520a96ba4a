"""The KV blocks of one sequence: a table for each KV group."""

from __future__ import annotations

from protocol.kv_layout import ONE_GROUP, KVGroup


class BlockTables:
    """`ids[g]` are the blocks of group g in order, from number `first[g]` of the sequence on: a
    group with a window gives up blocks that no later token sees. Those from number `complete[g]` on
    hold the KV of all their tokens. Does not allocate or free."""

    __slots__ = (
        "_block_size",
        "_single",
        "_step",
        "_step_from",
        "_whole",
        "complete",
        "first",
        "groups",
        "ids",
    )

    def __init__(self, groups: tuple[KVGroup, ...] = ONE_GROUP, block_size: int = 1) -> None:
        self.groups = groups
        self.ids: list[list[int]] = [[] for _ in groups]
        self.first = [0] * len(groups)
        self.complete = [0] * len(groups)
        self._block_size = block_size
        self._whole = all(group.window is None for group in groups)
        self._single = self._whole and len(groups) == 1
        # Tables of a step are kept until they or their starts change.
        self._step: tuple[tuple[int, ...], ...] | None = None
        self._step_from: list[int] = []

    def __bool__(self) -> bool:
        return any(self.ids)

    def blocks(self) -> list[int]:
        """All blocks, in the order of the tokens that they hold."""
        if len(self.ids) == 1:
            return self.ids[0]
        numbered = (
            (number, group, block)
            for group, ids in enumerate(self.ids)
            for number, block in enumerate(ids, self.first[group])
        )
        return [block for _, _, block in sorted(numbered)]

    def missing(self, num_tokens: int, chunk: int | None = None) -> int:
        """Blocks that it lacks for so many tokens. With `chunk`, groups with a window get no more
        than they need at a time while up to so many tokens run in a step."""
        if self._single:
            count = -(-num_tokens // self._block_size) - len(self.ids[0])
            return count if count > 0 else 0
        return sum(self._missing(num_tokens, chunk))

    def extend(self, num_tokens: int, fresh: list[int], chunk: int | None = None) -> None:
        """Take blocks for so many tokens, as many as are `missing`."""
        start = 0
        self._step = None
        for ids, count in zip(self.ids, self._missing(num_tokens, chunk), strict=True):
            ids += fresh[start : start + count]
            start += count
        assert start == len(fresh)

    def reuse(self, end: int, found: list[list[int]]) -> list[int]:
        """Take found[g] as the last blocks before number `end` of the sequence; returns the blocks
        that it gives up for them."""
        given_up: list[int] = []
        self._step = None
        for group, blocks in enumerate(found):
            ids, first = self.ids[group], end - len(blocks) - self.first[group]
            if blocks and first > len(ids):  # what lies before is out of the window
                given_up += ids
                self.ids[group], self.first[group] = list(blocks), end - len(blocks)
            elif blocks:
                given_up += ids[first : first + len(blocks)]
                ids[first : first + len(blocks)] = blocks
        return given_up

    def received(self, num_tokens: int) -> None:
        """A hand-off has filled them, for groups with a window only with what token `num_tokens`
        sees."""
        self.complete = [
            -(-group.first_token(num_tokens) // self._block_size) for group in self.groups
        ]

    def drop_unseen(self, position: int) -> list[int]:
        """Give up the blocks that neither the token at `position` nor a later one sees."""
        if self._whole:
            return []
        return self._drop([self.first_seen(g, position) for g in range(len(self.groups))])

    def drop_before(self, number: int) -> list[int]:
        """Give up the blocks before number `number` of the sequence."""
        return self._drop([number] * len(self.groups))

    def take(self) -> list[int]:
        """Give up all blocks."""
        blocks = self.blocks()
        self._step = None
        self.ids = [[] for _ in self.groups]
        self.first = [0] * len(self.groups)
        self.complete = [0] * len(self.groups)
        return blocks

    def part(self, group: int, first: int, end: int) -> tuple[int, ...]:
        """Those of the blocks first .. end - 1 of the sequence that are in a table."""
        skipped = self.first[group]
        return tuple(self.ids[group][max(0, first - skipped) : max(0, end - skipped)])

    def for_step(self, start: int) -> tuple[tuple[int, ...], ...]:
        """The tables of a step from position `start` on (SequenceStep.block_tables)."""
        if self._step is not None and self._whole:
            return self._step
        skipped = [self.first_seen(g, start) - first for g, first in enumerate(self.first)]
        if self._step is None or skipped != self._step_from:
            old, self._step_from = self._step_from, skipped
            known = self._step or ()
            self._step = tuple(
                known[g] if known and old[g] == count else tuple(ids[count:])
                for g, (ids, count) in enumerate(zip(self.ids, skipped, strict=True))
            )
        return self._step

    def first_seen(self, group: int, position: int) -> int:
        """The number of the first block that the token at `position` sees."""
        return self.groups[group].first_token(position) // self._block_size

    def holds(self, start: int, end: int) -> bool:
        """Whether the tables hold what tokens start .. end - 1 read and write."""
        return self.missing(end) == 0 and all(
            self.first[group] <= self.first_seen(group, start) for group in range(len(self.groups))
        )

    def _missing(self, num_tokens: int, chunk: int | None) -> list[int]:
        counts = []
        for group, first, ids in zip(self.groups, self.first, self.ids, strict=True):
            wanted = -(-num_tokens // self._block_size) - first
            if chunk is not None:
                wanted = min(wanted, group.num_blocks(num_tokens, self._block_size, chunk))
            counts.append(max(0, wanted - len(ids)))
        return counts

    def _drop(self, numbers: list[int]) -> list[int]:
        dropped: list[int] = []
        for group, number in enumerate(numbers):
            count = number - self.first[group]
            if count > 0:
                ids = self.ids[group]
                self._step = None
                dropped += ids[:count]
                del ids[:count]
                self.first[group] = number
        return dropped
