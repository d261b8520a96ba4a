"""Which cells and layers a hand-off moves, and which it has announced so far. Pure.

The cells of a hand-off are numbered KV group after group: cell = group * cells of the prompt +
number. Groups with a window send what the token after the prompt sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from protocol.errors import StaleMessage
from protocol.kv_layout import Cells, KVLayout
from protocol.messages import Grant

#: Decode's blocks for a hand-off: of each KV group those for the prompt, from the first one that a
#: token after the prompt sees on.
Tables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """A rectangle of a grant that one piece carries: cells of a KV group, counted from the first of
    the prompt, and layers (slots)."""

    group: int = 0
    first_cell: int
    num_cells: int
    first_layer: int
    num_layers: int


def check_sizes(tables: Tables, num_cached: int, num_tokens: int, layout: KVLayout) -> None:
    """Raise StaleMessage unless `num_tokens` need exactly the blocks of `tables` and fill the first
    `num_cached` blocks of the prompt."""
    sizes = [len(table) for table in tables]
    if layout.block_size < 1 or sizes != [
        layout.blocks_for(num_tokens) - layout.granted_from(group, num_tokens)
        for group in layout.groups
    ]:
        raise StaleMessage(
            f"{sizes} blocks of {layout.block_size} for {num_tokens} tokens", param="num_tokens"
        )
    if not 0 <= num_cached * layout.block_size <= num_tokens:
        raise StaleMessage(
            f"{num_cached} blocks cached of {sizes}, {num_tokens} tokens", param="num_cached_blocks"
        )


def writable_blocks(
    tables: Tables, num_cached: int, num_tokens: int, layout: KVLayout
) -> tuple[int, ...]:
    """Those that the hand-off fills: all but the first `num_cached` of the prompt."""
    return tuple(
        chain.from_iterable(
            table[max(0, num_cached - layout.granted_from(group, num_tokens)) :]
            for group, table in zip(layout.groups, tables, strict=True)
        )
    )


def num_writable(grant: Grant) -> int:
    """The number of blocks that a granted hand-off fills."""
    num_cached, num_tokens = grant.num_cached_blocks, grant.num_tokens
    return len(writable_blocks(grant.block_tables, num_cached, num_tokens, grant.layout))


def cells_in(
    tables: Tables, layout: KVLayout, num_tokens: int, *, size: int, first: int, count: int
) -> Cells:
    """Where cells of a hand-off, of `size` tokens, lie in the granted `tables` of `layout`."""
    group, number = divmod(first, -(-num_tokens // size))
    skipped = layout.granted_from(layout.groups[group], num_tokens) * layout.block_size // size
    return Cells.within(
        tables[group], layout.block_size, size=size, first=number - skipped, count=count
    )


def check_grant(grant: Grant) -> None:
    """Raise StaleMessage unless a grant's blocks fit its ticket, its tokens and its layout."""
    ids = list(chain.from_iterable(grant.block_tables))
    check_sizes(grant.block_tables, grant.num_cached_blocks, grant.num_tokens, grant.layout)
    if len(ids) > grant.ticket.num_blocks:
        raise StaleMessage(
            f"grant of {len(ids)} blocks, ticket for {grant.ticket.num_blocks}",
            param="block_tables",
        )
    within = not ids or 0 <= min(ids) <= max(ids) < grant.layout.num_blocks
    if not within or len(set(ids)) != len(ids):
        raise StaleMessage("grant names a block twice or out of range", param="block_tables")


class Coverage:
    """The set of announced (cell, layer) pairs, over `num_cells` x `num_layers` of each KV group.
    None may be announced twice; of the first `unsent[group]` cells, which decode has or does not
    need, none at all, nor of layers beyond `depths[group]`."""

    def __init__(
        self, *, num_cells: int, num_layers: int, unsent: Sequence[int], depths: Sequence[int]
    ) -> None:
        self._all_layers = (1 << num_layers) - 1
        self._num_layers = num_layers
        self.num_cells = num_cells
        self.unsent = unsent
        self._layers: list[int] = []
        for count, depth in zip(unsent, depths, strict=True):
            self._layers += [self._all_layers] * count
            self._layers += [self._all_layers >> depth << depth] * (num_cells - count)

    @classmethod
    def of(cls, layout: KVLayout, *, cell_size: int, num_tokens: int, num_cached: int) -> Coverage:
        """For a grant of blocks of `layout`, of which `num_cached` are cached."""
        cached = num_cached * layout.block_size
        return cls(
            num_cells=-(-num_tokens // cell_size),
            num_layers=layout.num_layers,
            unsent=[max(cached, g.first_token(num_tokens)) // cell_size for g in layout.groups],
            depths=[g.num_layers or layout.num_layers for g in layout.groups],
        )

    @property
    def complete(self) -> bool:
        """Whether every layer of every cell is cached or announced."""
        return self._layers.count(self._all_layers) == len(self._layers)

    def add(self, first_cell: int, num_cells: int, first_layer: int, num_layers: int) -> None:
        """Announce a rectangle. Raises StaleMessage, changing nothing, when it is empty, out of
        range or overlaps what was announced or cached."""
        end = first_cell + num_cells
        within = 0 <= first_cell < end <= len(self._layers)
        if not within or first_cell // self.num_cells != (end - 1) // self.num_cells:
            raise self.outside(first_cell, end)
        if num_layers < 1 or first_layer < 0 or first_layer + num_layers > self._num_layers:
            raise StaleMessage(
                f"layers [{first_layer}, {first_layer + num_layers}) are not within the model's "
                f"{self._num_layers}",
                param="first_layer",
            )
        mask = ((1 << num_layers) - 1) << first_layer
        announced = self._layers[first_cell:end]
        if announced.count(0) == num_cells:  # the common case, at C speed
            self._layers[first_cell:end] = [mask] * num_cells
            return
        for cell, layers in enumerate(announced, first_cell):
            if layers & mask:
                raise StaleMessage(
                    f"cell {cell} is cached or announced already", param="first_cell"
                )
        self._layers[first_cell:end] = [layers | mask for layers in announced]

    def outside(self, first: int, end: int) -> StaleMessage:
        """The error of a rectangle that is not within one KV group of the grant."""
        return StaleMessage(
            f"cells [{first}, {end}) are not within the {self.num_cells} granted",
            param="first_cell",
        )
