"""Which layers of which cells a hand-off has announced so far. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import StaleMessage
from protocol.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """A rectangle of a grant that one piece carries: cells (by index) and layers."""

    first_cell: int
    num_cells: int
    first_layer: int
    num_layers: int


def check_sizes(num_blocks: int, num_cached: int, num_tokens: int, layout: KVLayout) -> None:
    """Raise StaleMessage unless `num_tokens` need exactly `num_blocks` and fill the first
    `num_cached` of them."""
    if layout.block_size < 1 or layout.blocks_for(num_tokens) != num_blocks:
        raise StaleMessage(
            f"{num_blocks} blocks of {layout.block_size} for {num_tokens} tokens",
            param="num_tokens",
        )
    if not 0 <= num_cached * layout.block_size <= num_tokens:
        raise StaleMessage(
            f"{num_cached} blocks cached of {num_blocks}, {num_tokens} tokens",
            param="num_cached_blocks",
        )


class Coverage:
    """The set of announced (cell, layer) pairs over `num_cells` x `num_layers`. None may be
    announced twice; of the first `num_cached` cells, which decode has already, none at all."""

    def __init__(self, *, num_cells: int, num_cached: int, num_layers: int) -> None:
        self._all_layers = (1 << num_layers) - 1
        self._num_layers = num_layers
        self.num_cached = num_cached
        self._layers = [self._all_layers] * num_cached + [0] * (num_cells - num_cached)

    @classmethod
    def of(cls, layout: KVLayout, *, cell_size: int, num_tokens: int, num_cached: int) -> Coverage:
        """For a grant of blocks of `layout`, of which `num_cached` are cached."""
        return cls(
            num_cells=-(-num_tokens // cell_size),
            num_cached=num_cached * layout.block_size // cell_size,
            num_layers=layout.num_layers,
        )

    @property
    def num_cells(self) -> int:
        return len(self._layers)

    @property
    def complete(self) -> bool:
        """Whether every layer of every cell is cached or announced."""
        return self._layers.count(self._all_layers) == len(self._layers)

    def add(self, first_cell: int, num_cells: int, first_layer: int, num_layers: int) -> None:
        """Announce a rectangle. Raises StaleMessage, changing nothing, when it is empty, out of
        range or overlaps what was announced or cached."""
        if num_cells < 1 or first_cell < 0 or first_cell + num_cells > len(self._layers):
            raise StaleMessage(
                f"cells [{first_cell}, {first_cell + num_cells}) are not within the "
                f"{len(self._layers)} granted",
                param="first_cell",
            )
        if num_layers < 1 or first_layer < 0 or first_layer + num_layers > self._num_layers:
            raise StaleMessage(
                f"layers [{first_layer}, {first_layer + num_layers}) are not within the model's "
                f"{self._num_layers}",
                param="first_layer",
            )
        mask = ((1 << num_layers) - 1) << first_layer
        end = first_cell + num_cells
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
