"""Decode steps captured as CUDA graphs, one for each batch size and kind of context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.cuda.staging import Lane


class GraphSet:
    """Graphs keyed by (batch, long context); all share one memory pool, for one runs at a time.

    `run(batch, long)` must do the same work at the same addresses whenever it is called.
    """

    def __init__(
        self, batches: tuple[int, ...], run: Callable[[int, bool], Tensor], lane: Lane
    ) -> None:
        self._batches = batches
        self._run = run
        self._lane = lane
        self._pool: Any = None
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def bucket(self, batch: int) -> int | None:
        """The smallest captured batch that holds `batch` rows."""
        return next((n for n in self._batches if n >= batch), None)

    def capture_all(self) -> None:
        """Capture every size, the largest first, so that the smaller ones reuse its memory."""
        for batch in sorted(self._batches, reverse=True):
            for long in (False, True):
                self._capture(batch, long)

    def _capture(self, batch: int, long: bool) -> None:
        with self._lane.active():
            self._run(batch, long)
        self._lane.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._lane.stream):
            out = self._run(batch, long)
        self._pool = graph.pool()
        self._graphs[(batch, long)] = (graph, out)

    def replay(self, batch: int, long: bool) -> Tensor:
        """Run the graph on the current stream; its output, valid until the next replay."""
        graph, out = self._graphs[(batch, long)]
        graph.replay()
        return out
