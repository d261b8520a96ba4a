"""How the contexts of a step's decode rows are cut, as tables for its graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.cuda.attention import decode_cut
from engine.cuda.dense import AttentionSizes
from engine.cuda.options import StepShape, StepShapes
from engine.cuda.plan import StepPlan
from engine.kernels.triton.attention import decode_tiles
from engine.kernels.triton.splits import Ints, cuts_by_length, max_splits, plan_splits
from protocol.kv_layout import KVGroup


def shape_room(shape: StepShape, kv_heads: int) -> int:
    """The most splits of a step of that shape in one KV group; 0: contexts are not cut one by
    one."""
    if shape.chunk_programs:
        return shape.decode_programs // kv_heads
    return max_splits(shape.rows, kv_heads) if cuts_by_length(shape.rows, kv_heads) else 0


@dataclass(frozen=True, slots=True)
class SplitPlanner:
    """Cuts the contexts of decode rows, for one engine's steps."""

    sizes: AttentionSizes
    groups: tuple[KVGroup, ...]
    shapes: StepShapes

    def plan(self, plan: StepPlan) -> tuple[Ints, ...]:
        """The splits of each KV group. In a step of decode rows alone rows of padding are among
        them, whose output they make zeros."""
        count, layout, kv_heads = len(plan.decodes), plan.layout, self.sizes.kv_heads
        shape = None if layout is None else layout.shape
        if shape is None:
            shape = self.shapes.for_decodes(count, long_context=plan.long_context)
        room = shape_room(shape, kv_heads)
        if not (count and room):
            return ()
        lengths = np.zeros(shape.rows if layout is None else count, np.int32)
        lengths[:count] = [step.start + 1 for step in plan.decodes]
        tables: dict[int | None, Ints] = {}
        for window in dict.fromkeys(group.window for group in self.groups):
            seen = lengths if window is None else np.minimum(lengths, window)
            tiles = -(-seen // self._tile(shape, window or 0))
            tables[window] = plan_splits(tiles, kv_heads, room, mixed=shape.chunk_programs > 0)
        return tuple(tables[group.window] for group in self.groups)

    def _tile(self, shape: StepShape, window: int) -> int:
        """Context tokens that a program takes at once."""
        if shape.chunk_programs:
            return decode_tiles(self.sizes.head_dim)["tile"]
        return decode_cut(self.sizes, shape.rows, shape.long_context, window).tile
