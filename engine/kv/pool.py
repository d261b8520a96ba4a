"""The tensors of one rank's paged KV, and how far a step on a GPU has written it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.cpu.huge_pages import empty_on_huge_pages
from protocol.errors import Internal
from protocol.kv_layout import Cells, KVLayout

_DEPTH = 8  # steps remembered, more than are ever in flight


class KVPool:
    """`data[layer][block, k/v, kv_head, token, head_dim]` of one rank, in one allocation.

    Codes of one byte are bytes in `data` and `dtype`, which few operations know better, and codes
    in `layers`. Heads are counted within the rank. Safe from any thread whose caller owns the
    blocks; on a GPU, calls are ordered on the current stream. Memory starts as zeros: garbage could
    hold NaN.
    """

    def __init__(
        self, layout: KVLayout, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        first, last = layout.rank_heads[rank]
        self.num_layers = layout.num_layers
        self.num_heads = last - first
        self.block_size = layout.block_size
        self.head_dim = layout.head_dim
        self.num_blocks = layout.num_blocks
        self.dtype = torch.uint8 if dtype.itemsize == 1 else dtype
        self.device = device
        block = (2, self.num_heads, self.block_size, self.head_dim)
        shape = (self.num_layers, self.num_blocks, *block)
        if device.type == "cpu":
            self.data = empty_on_huge_pages(shape, self.dtype).zero_()
        else:
            self.data = torch.zeros(shape, dtype=self.dtype, device=device)
        self.layers: tuple[Tensor, ...] = self.data.view(dtype).unbind()
        #: Progress of steps on a GPU; None when a step is over once it was launched.
        self.step_events = StepEvents(layout.num_layers) if device.type == "cuda" else None

    def gather(
        self, cells: Cells, layers: range, heads: range, out: Tensor | None = None
    ) -> Tensor:
        """A contiguous copy `[layer, cell, k/v, head, token, head_dim]` of the named slice.

        `out`, when given, must be contiguous and of that shape.
        """
        if cells.size == self.block_size:
            source = self.data[layers.start : layers.stop]
            if len(heads) == self.num_heads:
                return torch.index_select(source, 1, self._index(cells.blocks), out=out)
            part = source[:, :, :, heads.start : heads.stop]
            result = torch.index_select(part, 1, self._index(cells.blocks))
        else:
            blocks, numbers = map(self._index, cells.places(self.block_size // cells.size))
            result = self._cells(cells.size, layers, heads)[:, blocks, numbers].contiguous()
        return result if out is None else out.copy_(result)

    def scatter(self, cells: Cells, layers: range, heads: range, data: Tensor) -> None:
        """Write `data`, shaped as `gather` returns it, into the named slice."""
        if cells.size == self.block_size:
            target = self.data[layers.start : layers.stop, :, :, heads.start : heads.stop]
            target.index_copy_(1, self._index(cells.blocks), data)
        else:
            blocks, numbers = map(self._index, cells.places(self.block_size // cells.size))
            self._cells(cells.size, layers, heads)[:, blocks, numbers] = data

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _cells(self, size: int, layers: range, heads: range) -> Tensor:
        """The pool as `[layer, block, cell, k/v, head, token, head_dim]`."""
        part = self.data[layers.start : layers.stop, :, :, heads.start : heads.stop]
        cells = part.view(*part.shape[:4], -1, size, self.head_dim)
        return cells.permute(0, 1, 4, 2, 3, 5, 6)


class StepEvents:
    """Events behind the KV of the last steps: per layer where a step records them, else per step.

    `begin`, `mark` and `end` belong to the thread that launches steps; the others are safe from any
    thread, for steps whose launch is over. Steps are numbered from 1 in launch order, alike on all
    ranks.
    """

    def __init__(self, num_layers: int) -> None:
        self._layers = [
            [torch.cuda.Event(blocking=True) for _ in range(num_layers)] for _ in range(_DEPTH)
        ]
        self._ends = [torch.cuda.Event(blocking=True) for _ in range(_DEPTH)]
        self._marked: list[list[int]] = [[] for _ in range(_DEPTH)]
        self._last = 0

    def begin(self) -> None:
        """A step is about to be queued on the current stream."""
        self._last += 1
        self._marked[self._last % _DEPTH] = []

    def mark(self, layer: int) -> None:
        """The kernels that write KV up to this layer were queued on the current stream. Layers
        between two marks are those of the second."""
        row = self._last % _DEPTH
        self._layers[row][layer].record()
        self._marked[row].append(layer)

    def end(self) -> int:
        """The whole step was queued on the current stream; returns its number."""
        self._ends[self._last % _DEPTH].record()
        return self._last

    def follow(self, stream: torch.cuda.Stream, step: int, layer: int) -> None:
        """Make a stream wait until `step` has written the KV of layers 0 .. layer."""
        event = self._event(step, layer)
        if event is not None:
            stream.wait_event(event)

    def wait(self, step: int, layer: int) -> None:
        """Block until `step` has written the KV of layers 0 .. layer."""
        event = self._event(step, layer)
        if event is not None:
            event.synchronize()

    def is_over(self, step: int) -> bool:
        """Whether all KV of `step` is written."""
        event = self._event(step, len(self._layers[0]) - 1)
        return event is None or event.query()

    def _event(self, step: int, layer: int) -> torch.cuda.Event | None:
        """None for a step long over. Raises Internal when it was not launched."""
        if step > self._last:
            raise Internal(f"step {step} was not launched, the newest is {self._last}")
        if step <= self._last - _DEPTH:
            return None
        row = step % _DEPTH
        marked = self._marked[row]
        at = bisect_left(marked, layer)
        return self._layers[row][marked[at]] if at < len(marked) else self._ends[row]
