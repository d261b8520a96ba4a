"""The bare links between two GPUs, and something for a GPU to do meanwhile."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.kv.pool import StepEvents
from kv_transfer.cuda.driver import close_memory, open_memory
from kv_transfer.cuda.nccl import Communicator

DEVICE = torch.device("cuda", 0)


def raw_messages(
    name: bytes, ctas: int, sizes: Sequence[int], repeats: int, *, sending: bool
) -> list[float]:
    """Seconds of one NCCL message of each size, back to back; both ends call it at once."""
    torch.cuda.set_device(DEVICE)
    torch.cuda.synchronize()
    limit = time.monotonic() + 60
    pair = Communicator(name, 0 if sending else 1, ctas=ctas, limit=limit)
    data = torch.randint(-128, 127, (max(sizes),), dtype=torch.int8, device=DEVICE)
    stream = torch.cuda.current_stream()
    post = pair.send if sending else pair.recv
    results = [
        _timed(partial(post, data.data_ptr(), size, stream.cuda_stream, limit), repeats)
        for size in sizes
    ]
    pair.abort()
    return results


def raw_copies(handle: bytes, offset: int, sizes: Sequence[int], repeats: int) -> list[float]:
    """Seconds of one contiguous copy of each size into another process's GPU buffer."""
    data = torch.randint(-128, 127, (max(sizes),), dtype=torch.int8, device=DEVICE)
    torch.cuda.synchronize()
    base = open_memory(handle)
    library = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64
    library.cuMemcpyDtoDAsync_v2.argtypes = (pointer, pointer, ctypes.c_size_t, ctypes.c_void_p)
    stream = torch.cuda.Stream()

    def copy(size: int) -> None:
        code = library.cuMemcpyDtoDAsync_v2(
            base + offset, data.data_ptr(), size, stream.cuda_stream
        )
        if code:
            raise RuntimeError(f"copy failed: {code}")

    with torch.cuda.stream(stream):
        results = [_timed(partial(copy, size), repeats) for size in sizes]
    close_memory(base)
    return results


class Decoding:
    """A thread that replays a graph of matrix-vector-like products, as a decode step is."""

    def __init__(self, num_bytes: int) -> None:
        shape = (num_bytes // (2 * 4096 * 4096), 4096, 4096)
        self._weights = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        self._times: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def sample(self, seconds: float) -> list[float]:
        """Seconds of each step that ends within the next `seconds`."""
        first = len(self._times)
        time.sleep(seconds)
        return self._times[first:]

    def stop(self) -> None:
        """Run no more steps."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        x = torch.randn(64, 4096, device=DEVICE, dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x @ self._weights[0]
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                y = x
                for weight in self._weights:
                    y = (y @ weight) * 0.015
            done = torch.cuda.Event(blocking=True)
            last = time.monotonic()
            while not self._stopped.is_set():
                graph.replay()
                done.record(stream)
                done.synchronize()
                now = time.monotonic()
                self._times.append(now - last)
                last = now


class Prompting:
    """Runs the products of an 8B model's prompt chunks, and records each layer's event as its
    engine does: about 2 x 218 million operations a token and layer."""

    def __init__(self, num_layers: int, step_events: Sequence[StepEvents]) -> None:
        self._num_layers = num_layers
        self._step_events = step_events
        make = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        self._up, self._down = make(4096, 26624), make(26624, 4096)
        self._stream = torch.cuda.Stream()

    def launch(self, tokens: int) -> tuple[int, torch.cuda.Event]:
        """Queue a chunk; its number and an event behind it."""
        done = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            for events in self._step_events:
                events.begin()
            x = torch.empty(tokens, 4096, device=DEVICE, dtype=torch.bfloat16).normal_()
            for layer in range(self._num_layers):
                for (
                    events
                ) in self._step_events:  # a layer's KV is there before most of its products
                    events.mark(layer)
                x = (x @ self._up) @ self._down
            steps = [events.end() for events in self._step_events]
            done.record(self._stream)
        return steps[0], done

    def now(self) -> tuple[float, torch.cuda.Event]:
        """One instant on both clocks (monotonic seconds); the device must be idle."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        event.synchronize()
        return time.monotonic(), event


def _timed(run: Callable[[], None], repeats: int) -> float:
    run()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats
