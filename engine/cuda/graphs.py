"""Steps captured as CUDA graphs, one for each shape."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from engine.cuda.options import StepShape
from engine.cuda.staging import DeviceStream


class GraphSet:
    """Graphs by shape; all share one memory pool, for one runs at a time.

    `run(shape)` must put the same work at the same addresses on the stream whenever it is called.
    """

    def __init__(self, run: Callable[[StepShape], Tensor], stream: DeviceStream) -> None:
        self._run = run
        self._stream = stream
        self._pool: Any = None
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture_all(self, shapes: Iterable[StepShape]) -> None:
        """Capture them in this order: the largest first, so that the smaller ones reuse its
        memory.

        Nothing is collected meanwhile: graphs of an engine that is gone, freed then, would end the
        capture.
        """
        gc.collect()
        gc.disable()
        try:
            for shape in shapes:
                self._capture(shape)
        finally:
            gc.enable()

    def _capture(self, shape: StepShape) -> None:
        with self._stream.active():
            self._run(shape)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream.stream):
            out = self._run(shape)
        self._pool = graph.pool()
        self._graphs[shape] = (graph, out)

    def run(self, shape: StepShape) -> Tensor:
        """The step's output on the current stream, valid until the next run: by its graph, where it
        was captured."""
        if shape not in self._graphs:
            return self._run(shape)
        graph, out = self._graphs[shape]
        graph.replay()
        return out
