"""Layers in groups of equal depth, so that all of them share one pool of KV blocks.

The idea of vLLM's hybrid KV cache manager: layers of one kind (all attention, or one window) are
cut into groups of `depth` layers, and a block is `depth` layers deep whatever group it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, takewhile

from engine.model.config import ModelConfig
from protocol.kv_layout import KVGroup

#: Each group has a block table of its own, which costs time in every step.
_MAX_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """`places[layer]` is the group of a layer and its slot in the group's blocks."""

    depth: int
    groups: tuple[KVGroup, ...]
    places: tuple[tuple[int, int], ...]

    def filled(self) -> tuple[range, ...]:
        """The slots that hold all their KV once that of a layer is written, and those before."""
        last = [0] * self.depth
        for layer, (_, slot) in enumerate(self.places):
            last[slot] = layer
        ends = [
            0,
            *(sum(1 for _ in takewhile(layer.__ge__, last)) for layer in range(len(self.places))),
        ]
        return tuple(range(first, end) for first, end in pairwise(ends))


def group_layers(config: ModelConfig, max_model_len: int) -> LayerGroups:
    """The groups of a model; those that attend to everything come first. A window that no context
    exceeds is none. Layers of one kind make one group."""
    kinds: dict[int | None, list[int]] = {None: []}
    for layer, window in enumerate(config.windows(max_model_len)):
        kinds.setdefault(window, []).append(layer)
    kinds = {window: layers for window, layers in kinds.items() if layers}
    depth = _depth([len(layers) for layers in kinds.values()])
    groups: list[KVGroup] = []
    places = [(0, 0)] * config.num_layers
    for window, layers in kinds.items():
        count = -(-len(layers) // depth)
        for first in range(count):
            part = layers[first::count]  # neighbours share a slot, so that slots fill up in order
            for slot, layer in enumerate(part):
                places[layer] = len(groups), slot
            num_layers = len(part) if len(part) < depth else None
            groups.append(KVGroup(window=window, num_layers=num_layers))
    return LayerGroups(depth=depth, groups=tuple(groups), places=tuple(places))


def _depth(counts: list[int]) -> int:
    """The depth that leaves the fewest slots of the first kind unused, then of the others: KV of
    the first kind, which attends to everything, grows with the context."""

    def unused(depth: int) -> tuple[int, int, int]:
        groups = [-(-count // depth) for count in counts]
        slots = [number * depth for number in groups]
        return slots[0] - counts[0], sum(slots) - sum(counts), sum(groups)

    depths = range(1, max(counts) + 1)
    few = [d for d in depths if sum(-(-count // d) for count in counts) <= _MAX_GROUPS]
    return min(few or [max(counts)], key=unused)
