"""The threads of a data plane."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class SerialThread:
    """Calls functions one after another in a thread of its own, on a device."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._device_error: RuntimeError | None = None  # of a broken GPU
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Raises RuntimeError when the process can start no thread."""
        self._thread.start()

    def put(self, function: Callable[[], object]) -> None:
        """Call it after those put before. It must not raise."""
        self._queue.put(function)

    def check_device(self) -> None:
        """Raise the error with which the device refused the thread, in that thread."""
        if self._device_error is not None:
            raise self._device_error

    def close(self) -> None:
        """End once everything put before was called."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end. A process that ends while a thread is in a call of torch aborts: the
        interpreter unwinds the thread through C++ that cannot be unwound."""
        if self._thread.ident is not None:  # it was started
            self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            enter_thread(self._device)
        except RuntimeError as error:
            self._device_error = error
        while (function := self._queue.get()) is not None:
            function()
            del function  # it may hold buffers


class SerialThreads:
    """A SerialThread for each key, started on first use. Safe from any thread."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._lock = threading.Lock()
        self._threads: dict[int, SerialThread] = {}
        self._closed = False

    def put(self, key: int, function: Callable[[], object]) -> None:
        """Call it in the key's thread, after those put before; here and now when closed, or when no
        thread can be started, because it has to be called."""
        with self._lock:
            thread = None if self._closed else self._threads.get(key) or self._start(key)
            if thread is not None:
                thread.put(function)
        if thread is None:
            function()

    def _start(self, key: int) -> SerialThread | None:
        thread = SerialThread(f"{self._name}-{key}", self._device)
        try:
            thread.start()
        except RuntimeError:
            return None
        self._threads[key] = thread
        return thread

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                for thread in self._threads.values():
                    thread.close()

    def join(self, timeout_s: float) -> bool:
        limit = time.monotonic() + timeout_s
        ended = [thread.join(limit - time.monotonic()) for thread in self._threads.values()]
        return all(ended)


class Values(Generic[T]):
    """`count` values that come from any thread and wake the event loop once, with the last."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: dict[int, T] = {}
        self._loop = asyncio.get_running_loop()
        self._complete: asyncio.Future[None] = self._loop.create_future()

    def add(self, key: int, value: T) -> None:
        """Take one, in any thread."""
        self._values[key] = value
        if len(self._values) == self._count:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake)

    async def all(self) -> dict[int, T]:
        """Wait for them. Cancelling the wait does not stop what they come from."""
        if self._count:
            await self._complete
        return self._values

    def _wake(self) -> None:
        if not self._complete.done():  # else cancelled, or two threads saw the last value
            self._complete.set_result(None)


async def await_callback(start: Callable[[Callable[[T], None]], object]) -> T:
    """Wait on the event loop for the value that `start` passes to its callback, once, in any
    thread. Cancelling the wait does not stop the work."""
    values: Values[T] = Values(1)
    start(partial(values.add, 0))
    return (await values.all())[0]


def enter_thread(device: torch.device) -> None:
    """Prepare the current thread to work on a pool on `device`. By default a thread is on the first
    visible GPU, where a call that names no device, such as waiting for an event, costs half a GiB
    for a context."""
    use_one_thread()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def use_one_thread() -> None:
    """Run this thread's tensor operations on this thread alone; other threads are not changed.

    libgomp lets the threads of a team spin between parallel regions only while the process has no
    more team members than processors; beyond that every region sleeps and wakes (gomp's throttled
    spin count). One idle team of a thread that just copies would slow down every step of the
    engine: SmolLM2 over HTTP on two cores, two threads a worker, went from 40 to 30 ms a token when
    loader and copy threads gave theirs up (machine not quiet).
    """
    torch.get_num_threads()  # takes the process's setting over for this thread, so that ours stays
    openmp = ctypes.CDLL(None)
    if hasattr(openmp, "omp_set_num_threads"):
        openmp.omp_set_num_threads(1)
