"""How work reaches the device: streams, steps captured as CUDA graphs, and pinned host memory on
its way there and back."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cuda.options import StepShape, is_large
from engine.kernels.triton.elementwise import COPIED_WORDS, copy_words

#: Poll interval of a watched wait: far below the time of a step.
_POLL_S = 50e-6
#: Graphs of a large step: KV of the layers in each leaves while the next runs.
_PIECES = 4


class DeviceStream:
    """The CUDA stream of one runner, and a second one beside it; no-ops on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.overlaps_launches = device.type == "cuda" and torch.cuda.get_device_capability(
            device
        ) >= (9, 0)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream; only where there is one."""
        if self._stream is None:
            raise RuntimeError("this device has no streams")
        return self._stream

    def enter_thread(self) -> None:
        """Select the stream's device for the calling thread. A thread starts on the first visible
        device, where a call that names no device would create a context of half a GiB."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)

    def active(self) -> AbstractContextManager[object]:
        """Make it the current stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Put work on the second stream, behind the current one's, which waits for it at `join`."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Have the current stream wait for the work of `beside`."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def synchronize(self) -> None:
        """Block until all work on the stream has ended."""
        if self._stream is not None:
            self._stream.synchronize()


class GraphSet:
    """Graphs by shape; all share one memory pool, for one runs at a time.

    `run(shape)` must put the same work at the same addresses on the stream whenever it is called.
    It calls `begins(layer)` between layers. A large shape is several graphs; when it runs,
    `ended(layers)` is called behind each but the last.
    """

    def __init__(
        self,
        run: Callable[[StepShape], Tensor],
        stream: DeviceStream,
        num_layers: int,
        ended: Callable[[slice], None],
    ) -> None:
        self._run = run
        self._stream = stream
        self._layers = -(-num_layers // _PIECES)  # of a graph
        self._ended = ended
        self._pool: Any = None
        self._captured: list[torch.cuda.CUDAGraph] | None = None
        self._graphs: dict[StepShape, tuple[list[torch.cuda.CUDAGraph], Tensor]] = {}

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
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            pieces = [self._begin()]
            self._captured = pieces if is_large(shape.rows) else None
            try:
                out = self._run(shape)
            finally:
                self._captured = None
                self._end(pieces[-1])
        self._graphs[shape] = (pieces, out)

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.capture_end()
        self._pool = graph.pool()

    def begins(self, layer: int) -> None:
        """The KV of all layers before this one is on the stream: while a large shape is captured,
        a graph may end here."""
        pieces = self._captured
        if pieces is not None and layer and layer % self._layers == 0:
            self._end(pieces[-1])
            pieces.append(self._begin())

    def run(self, shape: StepShape) -> Tensor:
        """The step's output on the current stream, valid until the next run: by its graphs, where
        they were captured."""
        if shape not in self._graphs:
            return self._run(shape)
        pieces, out = self._graphs[shape]
        for piece, graph in enumerate(pieces, start=1):
            graph.replay()
            if piece < len(pieces):
                self._ended(slice((piece - 1) * self._layers, piece * self._layers))
        return out

    def close(self) -> None:
        """Destroy the graphs: a communicator whose kernels are in one cannot be left before."""
        for pieces, _ in self._graphs.values():
            for graph in pieces:
                graph.reset()
        self._graphs.clear()


def copied_size(size: int) -> int:
    """The least size from `size` on that `copy` takes."""
    return -(-size // COPIED_WORDS) * COPIED_WORDS


def copy(source: Tensor, target: Tensor, size: int) -> None:
    """Copy the first `size` words of int32 vectors, between pinned memory and the device, on the
    current stream. As many as `copied_size` says are written."""
    words = copied_size(size)
    if source.is_cuda or target.is_cuda:
        copy_words(source[:words], target[:words])
    else:
        target[:words].copy_(source[:words])


class StepTimer:
    """Seconds that steps took on the device; 0 on a CPU. `depth`: steps that may be in flight."""

    def __init__(self, depth: int, device: torch.device) -> None:
        timed = depth if device.type == "cuda" else 0
        self._events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(timed)
        ]
        self._next = 0

    def begin(self) -> None:
        """A step is about to be queued on the current stream."""
        if self._events:
            self._next = (self._next + 1) % len(self._events)
            self._events[self._next][0].record()

    def end(self) -> int:
        """The step was queued; returns its index for `seconds`."""
        if self._events:
            self._events[self._next][1].record()
        return self._next

    def seconds(self, index: int) -> float:
        """Of a step that is over."""
        if not self._events:
            return 0.0
        first, last = self._events[index]
        return float(first.elapsed_time(last)) * 1e-3


def to_host(x: Tensor) -> Tensor:
    """A copy of x in pinned memory, complete once the current stream reaches it."""
    out = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return out.copy_(x, non_blocking=True)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on the device, without blocking."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class StagingRing:
    """Pinned int32 buffers used round robin; `take` blocks while a buffer's copy is in flight.

    It must outlive its copies: `copy` is a kernel, of which torch's allocator of pinned memory does
    not know, so that buffers of a ring that is gone are given to others at once.
    """

    def __init__(self, size: int, depth: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(depth)
        ]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._events: list[Any] = [None] * depth
        self._next = 0

    def take(self) -> tuple[Tensor, np.ndarray[Any, np.dtype[np.int32]], int]:
        """The next (buffer, numpy view of it, index for `sent`)."""
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        event = self._events[index]
        if event is not None:
            event.synchronize()
        return self._buffers[index], self._views[index], index

    def view(self, index: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Buffer `index`."""
        return self._views[index]

    def sent(self, index: int) -> None:
        """Record that the copy from or to buffer `index` is on the current stream."""
        if self._buffers[index].is_pinned():
            event = self._events[index] or torch.cuda.Event()
            event.record()
            self._events[index] = event

    def is_over(self, index: int) -> bool:
        """Whether the copy of `sent` is over."""
        event = self._events[index]
        return event is None or event.query()

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """Block until the copy of `sent` has ended.

        `watch` is polled meanwhile and may raise: a CUDA event has no wait with a timeout, and a
        kernel that waits for a lost peer does not end soon.
        """
        event = self._events[index]
        if event is None:
            return
        if watch is None:
            event.synchronize()
            return
        while not event.query():
            watch()
            time.sleep(_POLL_S)
