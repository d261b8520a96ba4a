"""What kv_transfer needs from a rank's KV pool. The engine's pool satisfies it structurally."""

from __future__ import annotations

from typing import Protocol

import torch

from protocol.kv_layout import Cells


class LayerEvents(Protocol):
    """Where a rank's engine is: lets a copy be queued behind a step that still runs. Steps are
    numbered from 1, alike on all ranks. Safe from any thread."""

    def follow(self, stream: torch.cuda.Stream, step: int, layer: int) -> None:
        """Have a stream wait for the KV that `step` writes, up to and with `layer`."""
        ...

    def wait(self, step: int, layer: int) -> None:
        """Block until that is written."""
        ...

    def is_over(self, step: int) -> bool:
        """Whether all KV of `step` is written."""
        ...


class BlockStore(Protocol):
    """One rank's paged KV, `[layer][block, k/v, kv_head, token, head_dim]`.

    Heads are counted within the rank. Both calls are safe from any thread as long as the caller
    owns the blocks; on a GPU they are ordered on the current stream. `marks` is None where a step
    is over once it was launched.
    """

    num_layers: int
    num_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def marks(self) -> LayerEvents | None:
        """How far steps in flight are."""
        ...

    def gather(
        self, cells: Cells, layers: range, heads: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A contiguous copy `[layer, cell, k/v, head, token, head_dim]` of the named slice."""
        ...

    def scatter(self, cells: Cells, layers: range, heads: range, data: torch.Tensor) -> None:
        """Write `data`, shaped as `gather` returns it, into the named slice."""
        ...


class PagedStore(BlockStore, Protocol):
    """A store whose pages lie in one contiguous tensor, as a GPU's must."""

    data: torch.Tensor
