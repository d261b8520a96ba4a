"""Pinned host memory on its way to the device and back, without waiting for either."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: How often a watched wait looks: far below the time of a step.
_LOOK_S = 50e-6


class StagingLane:
    """The stream that one runner's work is put on; on a device without streams, nothing."""

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
        """Make its device the calling thread's own. Until told otherwise a thread is on the first
        one that it sees, and whatever names no device costs that one half a GiB for a context."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)

    def active(self) -> AbstractContextManager[object]:
        """Make it the current stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Put work on a second stream: it follows what is on the current one, and what is put there
        after `join` follows it."""
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
        """Block until everything put on it is over."""
        if self._stream is not None:
            self._stream.synchronize()


def to_host(x: Tensor) -> Tensor:
    """`x` on the host once the current stream has come this far; does not wait for it."""
    out = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return out.copy_(x, non_blocking=True)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for either."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class StagingRing:
    """A few equal pinned int32 buffers used in turn; one is taken again only once it was copied."""

    def __init__(self, size: int, depth: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(depth)
        ]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._events: list[Any] = [None] * depth
        self._next = 0

    def take(self) -> tuple[Tensor, np.ndarray[Any, np.dtype[np.int32]], int]:
        """(buffer, numpy view of it, its number for `sent`)."""
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        event = self._events[index]
        if event is not None:
            event.synchronize()
        return self._buffers[index], self._views[index], index

    def sent(self, index: int) -> None:
        """The copy from or to buffer `index` has just been put on the current stream."""
        if self._buffers[index].is_pinned():
            event = self._events[index] or torch.cuda.Event()
            event.record()
            self._events[index] = event

    def is_over(self, index: int) -> bool:
        """Whether the copy of `sent` is over."""
        event = self._events[index]
        return event is None or event.query()

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """Block until the copy of `sent` is over.

        `watch` is called meanwhile and may raise: a device that waits for another one's word cannot
        tell that it is gone, and a device event has no wait with a timeout.
        """
        event = self._events[index]
        if event is None:
            return
        if watch is None:
            event.synchronize()
            return
        while not event.query():
            watch()
            time.sleep(_LOOK_S)
