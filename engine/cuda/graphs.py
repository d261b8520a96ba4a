"""Work captured as CUDA graphs, one for each of the shapes that it is done in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVarTuple

import torch
from torch import Tensor

from engine.cuda.staging import StagingLane

Key = TypeVarTuple("Key")


class GraphSet(Generic[*Key]):
    """Graphs by key; all share one memory pool, for one runs at a time.

    `run(*key)` must do the same work at the same addresses whenever it is called.
    """

    def __init__(self, run: Callable[[*Key], Tensor], lane: StagingLane) -> None:
        self._run = run
        self._lane = lane
        self._pool: Any = None
        self._graphs: dict[tuple[*Key], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture_all(self, keys: Iterable[tuple[*Key]]) -> None:
        """Capture them in this order: the largest first, so that the smaller ones reuse its
        memory.

        Nothing is collected meanwhile: graphs of an engine that is gone, freed then, would end the
        capture.
        """
        gc.collect()
        gc.disable()
        try:
            self._capture(keys)
        finally:
            gc.enable()

    def _capture(self, keys: Iterable[tuple[*Key]]) -> None:
        for key in keys:
            with self._lane.active():
                self._run(*key)
            self._lane.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._lane.stream):
                out = self._run(*key)
            self._pool = graph.pool()
            self._graphs[key] = (graph, out)

    def replay(self, *key: *Key) -> Tensor:
        """Run the graph on the current stream; its output, valid until the next replay."""
        graph, out = self._graphs[key]
        graph.replay()
        return out
