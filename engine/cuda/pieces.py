"""Steps of prompt tokens without a hundred launches: graphs of what lies between two attentions.

Launching the kernels of such a step one by one takes longer than running them where there are a few
hundred tokens. Attention depends on the prompts and is launched as ever; everything between it and
the attention of the next layer depends on the number of rows alone, which is rounded up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.cuda.graphs import GraphSet
from engine.cuda.layout import DENSE_TOKENS, ChunkRows
from engine.cuda.staging import StagingLane

#: Rows are rounded up to a multiple of this; more of them than the most outlast their launches.
_ROWS, _MOST_ROWS = 128, 512
assert _MOST_ROWS < DENSE_TOKENS  # all chunks are packed


def piece_sizes(max_tokens: int) -> tuple[int, ...]:
    """Rows of the steps that graphs serve."""
    return tuple(range(_ROWS, min(_MOST_ROWS, max_tokens) + 1, _ROWS))


class PromptPieces:
    """Graphs by (rows, layer), and the buffers that they and the attention between them share.

    `between(layer, h, attended, wide, positions, slots)` puts on the stream what leads to a layer's
    attention.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        widths: tuple[int, int, int],
        between: Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], None],
        lane: StagingLane,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """widths: columns of the hidden states, of attention's output, of its input."""
        self._sizes = sizes
        self._between = between
        rows = sizes[-1]
        self._h, self._attended, self._wide = (
            torch.zeros(rows, width, dtype=dtype, device=device) for width in widths
        )
        self._positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self._slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._graphs = GraphSet(self._run, lane)

    def capture(self, num_layers: int) -> None:
        """Capture all sizes, the largest first. Nothing is written to the KV pool."""
        self._graphs.capture_all(
            (rows, layer) for rows in reversed(self._sizes) for layer in range(num_layers)
        )

    def begin(self, chunks: ChunkRows) -> tuple[Tensor, Tensor, Tensor]:
        """Where a step's hidden states, attention's output and its input lie."""
        rows = chunks.positions.shape[0]
        self._positions[:rows].copy_(chunks.positions)
        self._slots[:rows].copy_(chunks.slots)
        return self._h[:rows], self._attended[:rows], self._wide[:rows]

    def replay(self, rows: int, layer: int) -> None:
        """What leads to the attention of `layer`."""
        self._graphs.replay(rows, layer)

    def _run(self, rows: int, layer: int) -> Tensor:
        h, wide = self._h[:rows], self._wide[:rows]
        positions, slots = self._positions[:rows], self._slots[:rows]
        self._between(layer, h, self._attended[:rows], wide, positions, slots)
        return wide
