"""Links within one process, in place of tcp's: a message is one copy between two tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from kv_transfer.backends.base import LinkBroken, LinkId


class _Pipe:
    """A rendezvous: send offers a tensor, recv copies out of it, then send returns."""

    def __init__(self, link: LinkId) -> None:
        self._name = str(link)
        self._changed = threading.Condition()
        self._offered: torch.Tensor | None = None
        self._broken = False
        self._ends = 0

    def arrive(self, timeout_s: float) -> None:
        """Wait for the other end."""
        with self._changed:
            self._ends += 1
            self._changed.notify_all()
            self._wait(lambda: self._ends >= 2, time.monotonic() + timeout_s, "connect")

    def send(self, data: torch.Tensor, timeout_s: float) -> None:
        """Offer `data` until the receiver has copied it."""
        limit = time.monotonic() + timeout_s
        with self._changed:
            self._wait(lambda: self._offered is None, limit, "send")
            self._offered = data
            self._changed.notify_all()
            self._wait(lambda: self._offered is not data, limit, "send")

    def recv(self, data: torch.Tensor, timeout_s: float) -> None:
        """Copy what the sender offers."""
        limit = time.monotonic() + timeout_s
        with self._changed:
            self._wait(lambda: self._offered is not None, limit, "recv")
            offered = self._offered
            assert offered is not None
            if offered.numel() != data.numel():
                self._break()
                raise LinkBroken(f"link {self._name}: {offered.numel()} bytes, not {data.numel()}")
            data.copy_(offered)
            self._offered = None
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._break()

    def _break(self) -> None:
        self._broken = True
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], limit: float, what: str) -> None:
        done = self._changed.wait_for(
            lambda: self._broken or ready(), max(0.0, limit - time.monotonic())
        )
        if self._broken:
            raise LinkBroken(f"link {self._name}: closed during {what}")
        if not done:
            self._break()
            raise LinkBroken(f"link {self._name}: {what} timed out")


class MemoryHub:
    """Connects the backends of one process. Pass the same hub to each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipes: dict[LinkId, _Pipe] = {}

    def pipe(self, link: LinkId) -> _Pipe:
        """The pipe of a link; the second end takes it out of the hub."""
        with self._lock:
            pipe = self._pipes.pop(link, None)
            if pipe is None:
                pipe = self._pipes[link] = _Pipe(link)
            return pipe

    def forget(self, link: LinkId) -> None:
        """Drop a pipe whose other end never connected."""
        with self._lock:
            self._pipes.pop(link, None)


class MemoryBackend:
    """One rank's end of the hub."""

    name = "tcp"

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._opening: set[_Pipe] = set()

    def listen(self) -> str:
        """Return a fixed endpoint: link ids are enough."""
        return "memory"

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> _Pipe:
        """Wait for the receiver."""
        return self._meet(link, timeout_s)

    def accept(self, link: LinkId, timeout_s: float) -> _Pipe:
        """Wait for the sender."""
        return self._meet(link, timeout_s)

    def close(self) -> None:
        """Close the pipes that wait for their other end."""
        for pipe in list(self._opening):
            pipe.close()

    def _meet(self, link: LinkId, timeout_s: float) -> _Pipe:
        pipe = self._hub.pipe(link)
        self._opening.add(pipe)
        try:
            pipe.arrive(timeout_s)
        except LinkBroken:
            self._hub.forget(link)
            raise
        finally:
            self._opening.discard(pipe)
        return pipe
