"""Which layers of which blocks a hand-off has named so far. Pure."""

from __future__ import annotations

from protocol.errors import StaleMessage


class Coverage:
    """A set of (block, layer) pairs over `num_blocks` x `num_layers`, of which none is named twice.

    The first `num_cached` blocks are already there and must not be named at all.
    """

    def __init__(self, *, num_blocks: int, num_cached: int, num_layers: int) -> None:
        self._all_layers = (1 << num_layers) - 1
        self._num_layers = num_layers
        self._num_cached = num_cached
        self._layers = [self._all_layers if i < num_cached else 0 for i in range(num_blocks)]

    @property
    def complete(self) -> bool:
        """Whether every layer of every block is there or was named."""
        return self._layers.count(self._all_layers) == len(self._layers)

    def add(self, first_block: int, num_blocks: int, first_layer: int, num_layers: int) -> None:
        """Name a rectangle. Raises StaleMessage, changing nothing, when it is empty, out of range
        or overlaps what is there already."""
        if num_blocks < 1 or first_block < 0 or first_block + num_blocks > len(self._layers):
            raise StaleMessage(
                f"blocks [{first_block}, {first_block + num_blocks}) are not within the "
                f"{len(self._layers)} granted",
                param="first_block",
            )
        if num_layers < 1 or first_layer < 0 or first_layer + num_layers > self._num_layers:
            raise StaleMessage(
                f"layers [{first_layer}, {first_layer + num_layers}) are not within the model's "
                f"{self._num_layers}",
                param="first_layer",
            )
        mask = ((1 << num_layers) - 1) << first_layer
        end = first_block + num_blocks
        named = self._layers[first_block:end]
        if any(named):  # the common case, none, is checked at C speed
            for block, layers in enumerate(named, first_block):
                if layers & mask:
                    raise StaleMessage(
                        f"block {block} is there or named already", param="first_block"
                    )
        self._layers[first_block:end] = [layers | mask for layers in named]
