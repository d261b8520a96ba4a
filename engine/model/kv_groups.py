"""Layers in groups of equal depth, so that all of them share one pool of KV blocks.

The idea of vLLM's hybrid KV cache manager: layers of one kind (all attention, or one window) are
cut into groups of `depth` layers, and a block is `depth` layers deep whatever group it belongs to.
Layers whose KV heads differ in number or size are of different kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import gcd, lcm

from engine.model.config import ModelConfig
from protocol.kv_layout import KVGroup

#: Each group has a block table of its own, which costs time in every step; more of them where
#: layers differ in their KV heads (Gemma 4 31B has 5 slots without a window and 50 with one).
_MAX_GROUPS, _MAX_MIXED_GROUPS = 8, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlanes:
    """How KV heads of several sizes share a slot, `[k/v, plane, token, plane_dim]` of a block.

    A head of `n plane_dim` dims lies in n planes. A slot has as many planes for each KV head of a
    layer, `count` over their number, so that ranks which share the heads evenly share the planes
    evenly, too; layers whose heads take few of them share the slot.
    """

    count: int
    plane_dim: int

    @staticmethod
    def of(shapes: Iterable[tuple[int, int]]) -> KVPlanes:
        """The fewest planes for layers with (KV heads, head size)."""
        kinds = set(shapes)
        plane_dim = gcd(*(dim for _, dim in kinds))
        unit = lcm(*(heads for heads, _ in kinds))
        most = max(heads * dim // plane_dim for heads, dim in kinds)
        return KVPlanes(count=-(-most // unit) * unit, plane_dim=plane_dim)

    def layers_in_slot(self, num_kv_heads: int, head_dim: int) -> int:
        """Layers of that kind that share a slot."""
        return self.count // num_kv_heads // (head_dim // self.plane_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """`places[layer]` is the group of a layer and its slot in the group's blocks, `parts[layer]`
    its number among the layers of that slot."""

    depth: int
    groups: tuple[KVGroup, ...]
    places: tuple[tuple[int, int], ...]
    parts: tuple[int, ...]
    planes: KVPlanes

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
    shapes = config.kv_shapes
    planes, kinds = KVPlanes.of(shapes), _kinds(config, max_model_len)
    shares = {kind: planes.layers_in_slot(*kind[1]) for kind in kinds}
    slots = {kind: -(-len(layers) // shares[kind]) for kind, layers in kinds.items()}
    depth = _depth(list(slots.values()), _MAX_MIXED_GROUPS if len(set(shapes)) > 1 else _MAX_GROUPS)
    groups: list[KVGroup] = []
    places, parts = [(0, 0)] * config.num_layers, [0] * config.num_layers
    for (window, shape), layers in kinds.items():
        share, count = shares[window, shape], -(-slots[window, shape] // depth)
        used = [0] * count
        for number, layer in enumerate(layers):
            place, parts[layer] = divmod(number, share)
            slot, group = divmod(place, count)  # neighbours share a slot: slots fill up in order
            places[layer] = len(groups) + group, slot
            used[group] = slot + 1
        own = {} if len(set(shapes)) == 1 else {"num_kv_heads": shape[0], "head_dim": shape[1]}
        groups += [
            KVGroup(window=window, num_layers=None if n == depth else n, **own) for n in used
        ]
    return LayerGroups(
        depth=depth,
        groups=tuple(groups),
        places=tuple(places),
        parts=tuple(parts),
        planes=planes,
    )


def _kinds(
    config: ModelConfig, max_model_len: int
) -> dict[tuple[int | None, tuple[int, int]], list[int]]:
    """The layers of each window and shape of KV, those without a window first."""
    kinds: dict[tuple[int | None, tuple[int, int]], list[int]] = {}
    for layer, kind in enumerate(zip(config.windows(max_model_len), config.kv_shapes, strict=True)):
        kinds.setdefault(kind, []).append(layer)
    return dict(sorted(kinds.items(), key=lambda item: item[0][0] is not None))


def _depth(counts: list[int], max_groups: int) -> int:
    """The depth that leaves the fewest slots of the first kind unused, then of the others: KV of
    the first kind, which attends to everything, grows with the context."""

    def unused(depth: int) -> tuple[int, int, int]:
        groups = [-(-count // depth) for count in counts]
        slots = [number * depth for number in groups]
        return slots[0] - counts[0], sum(slots) - sum(counts), sum(groups)

    depths = range(1, max(counts) + 1)
    few = [d for d in depths if sum(-(-count // d) for count in counts) <= max_groups]
    return min(few or [max(counts)], key=unused)
