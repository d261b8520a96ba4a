"""Dense copies of the KV of running sequences, for decode steps on a CPU.

Attention wants each sequence's keys and values in one piece, the pool has them in pages. Gathering
the pages costs every step about as much as attending does. So the sequences of the last decode step
keep a dense copy, a slot each, to which a step only adds its own token. The pool stays the only
truth: a slot is used again only if it was made from the same blocks and none of them has been
written since, other than through the mirror itself; else it is made anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.base import Geometry, StepInputs
from engine.kernels.memory import empty_on_huge_pages

#: Slots grow by so many tokens. All of a slot is attended to, because batched products of parts of
#: matrices are several times slower than of whole ones: more would be wasted, less moved too often.
_GROWTH_TOKENS = 64
#: Slots shrink when the longest sequence needs less than this share of them.
_SHRINK_BELOW = 0.6


class BlockVersions:
    """A number per block that changes whenever the block is written. Any thread may write."""

    def __init__(self, num_blocks: int) -> None:
        self._numbers = [0] * num_blocks

    def wrote(self, blocks: Iterable[int]) -> None:
        """The content of `blocks` is no longer what it was."""
        for block in blocks:
            self._numbers[block] += 1

    def of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The numbers of `blocks` as they are now."""
        return tuple(map(self._numbers.__getitem__, blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorPlan:
    """The mirrored decodes of one step: rows 0 .. num_rows - 1 of the step.

    layers: copies `[2, slots K, capacity, D]` by the address of the pool's layer. write_rows: rows
    of a layer's copy seen as `[.., D]` that take k and v of each step row, `[num_rows, 2 K]`.
    mask: added to scores, `[num_rows K, 1, capacity]`. order, back: rows in the order of slots and
    slots in the order of rows, or None when they agree.
    """

    num_rows: int
    layers: dict[int, Tensor]
    write_rows: Tensor
    mask: Tensor
    order: Tensor | None
    back: Tensor | None


@dataclass(frozen=True, slots=True)
class _Slot:
    """What a slot holds: the first `context` tokens of the sequence in `blocks`."""

    context: int
    blocks: tuple[int, ...]
    versions: tuple[int, ...]


class DecodeMirror:
    """The copies, and what they are copies of. Used from one thread."""

    def __init__(
        self, pool: Tensor, versions: BlockVersions, geometry: Geometry, limit_bytes: int
    ) -> None:
        """`pool`: `[layer, block, 2, K, B, D]`; the copies never take more than `limit_bytes`."""
        self._pool = pool
        self._versions = versions
        self._geometry = geometry
        self._limit_bytes = limit_bytes
        self._slots: list[_Slot] = []
        self._num_slots = 0
        self._capacity = 0
        self._data = pool.new_empty(0)
        self._layers: dict[int, Tensor] = {}

    def place(self, inputs: StepInputs, num_rows: int) -> MirrorPlan | None:
        """Mirror the first `num_rows` decodes of a step; None when they do not fit the limit.

        Must see every step, with `num_rows` 0 too: what a step writes past the mirror makes copies
        of the same blocks worthless.
        """
        if num_rows and not self._reserve(num_rows, inputs.contexts[0]):
            num_rows = 0
        self._note_writes(inputs, num_rows)
        if num_rows == 0:
            return None
        slots = self._assign(inputs, num_rows)
        return self._plan(inputs, slots)

    def _note_writes(self, inputs: StepInputs, num_rows: int) -> None:
        size = self._geometry.block_size
        for s in range(num_rows, len(inputs.queries)):
            first = (inputs.contexts[s] - inputs.queries[s]) // size
            self._versions.wrote(inputs.block_ids[s][first:])

    def _reserve(self, num_rows: int, longest: int) -> bool:
        """Room for `num_rows` slots of `longest` tokens; a new size forgets every copy."""
        capacity = -(-longest // _GROWTH_TOKENS) * _GROWTH_TOKENS
        fits = _SHRINK_BELOW * self._capacity <= capacity <= self._capacity
        if num_rows <= self._num_slots and fits:
            return True
        geometry, pool = self._geometry, self._pool
        num_slots = max(self._num_slots, 1 << (num_rows - 1).bit_length())
        shape = (pool.shape[0], 2, num_slots * geometry.num_kv_heads, capacity, geometry.head_dim)
        if torch.Size(shape).numel() * pool.element_size() > self._limit_bytes:
            return False
        self._slots, self._layers, self._data = [], {}, pool.new_empty(0)  # free before taking
        self._num_slots, self._capacity = num_slots, capacity
        self._data = empty_on_huge_pages(shape, pool.dtype)
        pairs = zip(pool.unbind(), self._data.unbind(), strict=True)
        self._layers = {layer.data_ptr(): copy for layer, copy in pairs}
        return True

    def _assign(self, inputs: StepInputs, num_rows: int) -> list[int]:
        """The slot of each row. Afterwards exactly the slots 0 .. num_rows - 1 are in use."""
        old = {self._key(slot.blocks, slot.context): i for i, slot in enumerate(self._slots)}
        found: list[int | None] = []
        for row in range(num_rows):
            blocks, start = inputs.block_ids[row], inputs.contexts[row] - 1
            slot = old.pop(self._key(blocks, start), None) if start else None
            fits = slot is not None and self._holds(self._slots[slot], blocks, start)
            found.append(slot if fits else None)
        kept = {slot for slot in found if slot is not None}
        holes = sorted(set(range(num_rows)) - kept, reverse=True)  # the lowest is popped first
        slots = []
        for row, slot in enumerate(found):
            if slot is not None and slot < num_rows:
                slots.append(slot)
                continue
            target = holes.pop()
            if slot is None:
                self._fill(target, inputs.block_ids[row], inputs.contexts[row] - 1)
            else:
                self._move(slot, target, inputs.contexts[row] - 1)
            slots.append(target)
        by_slot = sorted(range(num_rows), key=slots.__getitem__)
        self._slots = [self._slot(inputs.block_ids[row], inputs.contexts[row]) for row in by_slot]
        return slots

    def _slot(self, blocks: tuple[int, ...], context: int) -> _Slot:
        return _Slot(context, blocks, self._versions.of(blocks))

    def _key(self, blocks: tuple[int, ...], context: int) -> tuple[int, int]:
        """What tells running sequences apart quickly: length and the block of the last token."""
        return context, blocks[(context - 1) // self._geometry.block_size]

    def _holds(self, slot: _Slot, blocks: tuple[int, ...], start: int) -> bool:
        """Whether the slot is a current copy of the first `start` tokens in `blocks`."""
        used = len(slot.blocks)
        return (
            slot.context == start
            and slot.blocks == blocks[:used]
            and slot.versions == self._versions.of(slot.blocks)
        )

    def _span(self, slot: int) -> slice:
        heads = self._geometry.num_kv_heads
        return slice(slot * heads, (slot + 1) * heads)

    def _fill(self, slot: int, blocks: tuple[int, ...], start: int) -> None:
        """Copy the first `start` tokens out of the pool; zeros after them, where masks point."""
        size = self._geometry.block_size
        used = -(-start // size)
        target = self._data[:, :, self._span(slot)]
        target[:, :, :, used * size :].zero_()
        if used:
            pages = self._pool[:, list(blocks[:used])].permute(0, 2, 3, 1, 4, 5)
            target[:, :, :, : used * size].unflatten(3, (used, size)).copy_(pages)

    def _move(self, source: int, target: int, start: int) -> None:
        span = self._data[:, :, self._span(target)]
        span[:, :, :, :start] = self._data[:, :, self._span(source), :start]
        span[:, :, :, start:].zero_()

    def _plan(self, inputs: StepInputs, slots: list[int]) -> MirrorPlan:
        num_rows, geometry = len(slots), self._geometry
        heads, capacity = geometry.num_kv_heads, self._capacity
        slot = torch.tensor(slots)
        context = torch.tensor(inputs.contexts[:num_rows])
        kind = torch.arange(2)[None, :, None] * (self._num_slots * heads)
        lane = slot[:, None, None] * heads + torch.arange(heads)[None, None, :] + kind
        write_rows = (lane * capacity + (context - 1)[:, None, None]).flatten(1)
        order = None if slots == list(range(num_rows)) else torch.argsort(slot)
        ordered = context if order is None else context[order]
        hidden = torch.arange(capacity)[None, :] >= ordered[:, None]
        mask = torch.zeros(hidden.shape, dtype=geometry.dtype).masked_fill_(hidden, -torch.inf)
        return MirrorPlan(
            num_rows=num_rows,
            layers=self._layers,
            write_rows=write_rows,
            mask=mask.repeat_interleave(heads, 0)[:, None],
            order=order,
            back=None if order is None else slot,
        )
