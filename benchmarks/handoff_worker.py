"""One side of the hand-off benchmark in a process of its own, told what to do over a pipe.

Its GPU is the only one that it sees, as under a cluster's scheduler.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from engine.kv.pool import KVPool
from kv_transfer.config import TransferConfig
from kv_transfer.cuda.driver import close_memory, export_memory, open_memory
from kv_transfer.cuda.nccl import Communicator, unique_id
from kv_transfer.data_plane import DataPlane
from kv_transfer.listeners import TransferReport
from kv_transfer.ranks import LocalRanks
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from protocol.errors import ErrorInfo
from protocol.ids import RequestKey, Role, WorkerRef, new_epoch
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.messages import Commit, Grant
from protocol.ticket import Ticket
from rpc import methods
from rpc.service import ClientPool, ControlServer

SECRET = b"the benchmark's secret"
_DEVICE = torch.device("cuda", 0)
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One hand-off as both sides are told of it."""

    key: RequestKey
    ticket: Ticket
    prefill: WorkerRef
    decode: WorkerRef
    source: tuple[int, ...]
    dest: tuple[int, ...]


@dataclass(slots=True)
class _Ends:
    """When what happened, by key (monotonic seconds, one clock for all processes of a host)."""

    loop: asyncio.AbstractEventLoop
    times: dict[RequestKey, asyncio.Future[float]] = field(default_factory=dict)
    grants: dict[RequestKey, asyncio.Future[float]] = field(default_factory=dict)

    def expect(self, key: RequestKey) -> None:
        self.times[key] = self.loop.create_future()
        self.grants[key] = self.loop.create_future()

    def granted(self, key: RequestKey, grant: Grant) -> None:
        self.grants[key].set_result(time.monotonic())

    def committed(self, key: RequestKey, result: Commit | TransferReport) -> None:
        self.times[key].set_result(time.monotonic())

    def ended(self, key: RequestKey, error: ErrorInfo | None) -> None:
        failure = RuntimeError(f"{key} ended: {error}")
        for future in (self.times[key], self.grants[key]):
            if not future.done():
                future.set_exception(failure)

    def blocks_safe(self, key: RequestKey, block_ids: tuple[int, ...]) -> None:
        pass


class Side:
    """What the commands of the pipe call."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._clients = ClientPool(secret=SECRET)
        self._server: ControlServer | None = None
        self._planes: list[DataPlane] = []
        self._pools: list[KVPool] = []
        self._end: Any = None
        self._decoding: _Decoding | None = None

    async def build(self, layout: KVLayout, config: TransferConfig) -> WorkerRef:
        """A worker of this layout, all ranks on the one GPU; the one before is closed."""
        await self.drop()
        self._layout = layout
        self._pools = [KVPool(layout, r, torch.bfloat16, _DEVICE) for r in range(layout.tp_size)]
        self._planes = [DataPlane(pool, config) for pool in self._pools]
        self._server = ControlServer(secret=SECRET)
        address = self._server.bind()
        ref = WorkerRef(
            worker_id=str(self._role), epoch=new_epoch(), role=self._role, address=address
        )
        self._events = _Ends(asyncio.get_running_loop())
        common: dict[str, Any] = {
            "ref": ref,
            "layout": layout,
            "fingerprint": _fingerprint(layout),
            "secret": SECRET,
            "ranks": LocalRanks(self._planes),
            "clients": self._clients,
            "config": config,
            "listener": self._events,
        }
        if self._role is Role.PREFILL:
            sender = self._end = Sender(**common)
            self._server.add({methods.GRANT: sender.on_grant, methods.END: sender.on_end})
        else:
            receiver = self._end = Receiver(**common)
            await receiver.start()
            self._server.add(
                {
                    methods.PIECE: receiver.on_piece,
                    methods.COMMIT: receiver.on_commit,
                    methods.END: receiver.on_end,
                }
            )
        await self._server.start()
        return ref

    async def drop(self) -> None:
        """Close the worker, free its memory."""
        if self._server is None:
            return
        await self._end.close()
        for plane in self._planes:
            await asyncio.to_thread(plane.close)
        await self._server.stop()
        self._server, self._end, self._planes, self._pools = None, None, [], []
        torch.cuda.empty_cache()

    async def fill(self, blocks: Sequence[int], seed: int) -> None:
        """Random bits, the same on both sides for the same seed."""
        ids = torch.tensor(blocks, device=_DEVICE)
        for layer, bits in enumerate(_random_layers(self._layout, len(blocks), seed)):
            for pool, (first, last) in zip(self._pools, self._layout.rank_heads, strict=True):
                pool.data[layer, ids] = bits[:, :, first:last]
        torch.cuda.synchronize()

    async def wrong_layers(self, blocks: Sequence[int], seed: int) -> int:
        """Layers, over all ranks, that do not hold exactly what `fill` put into the other side."""
        ids = torch.tensor(blocks, device=_DEVICE)
        wrong = 0
        for layer, bits in enumerate(_random_layers(self._layout, len(blocks), seed)):
            for pool, (first, last) in zip(self._pools, self._layout.rank_heads, strict=True):
                got = pool.data[layer, ids].view(torch.int16)
                wrong += not torch.equal(got, bits[:, :, first:last].view(torch.int16))
        return wrong

    async def expect(self, handoffs: Sequence[Handoff]) -> None:
        """Prefill: learn of requests."""
        for handoff in handoffs:
            self._events.expect(handoff.key)
            self._end.expect(handoff.key, handoff.ticket, handoff.decode)

    async def reserve(self, handoffs: Sequence[Handoff]) -> None:
        """Decode: learn of requests and grant their blocks."""
        for handoff in handoffs:
            self._events.expect(handoff.key)
            self._end.offer(handoff.key, handoff.ticket, handoff.prefill)
            await self._end.reserve(handoff.key, handoff.dest, 0)

    async def send(self, handoffs: Sequence[Handoff], window: int) -> list[tuple[float, float]]:
        """Prefill: push and commit, `window` at a time; (push, commit acknowledged) of each."""
        turns = asyncio.Semaphore(window)

        async def one(handoff: Handoff) -> tuple[float, float]:
            await asyncio.wait_for(self._events.grants[handoff.key], _PATIENCE_S)
            async with turns:
                start = time.monotonic()
                self._end.push(handoff.key, handoff.source, 0, len(handoff.source))
                self._end.commit(handoff.key, 1)
                end = await asyncio.wait_for(self._events.times[handoff.key], _PATIENCE_S)
            return start, end

        return list(await asyncio.gather(*(one(handoff) for handoff in handoffs)))

    async def commits(self, keys: Sequence[RequestKey]) -> list[float]:
        """Decode: when it came to own each."""
        return [await asyncio.wait_for(self._events.times[key], _PATIENCE_S) for key in keys]

    # --- raw links ------------------------------------------------------------------------------

    async def nccl_name(self) -> bytes:
        """A name for a communicator."""
        torch.cuda.synchronize()
        return unique_id()

    async def raw_nccl(
        self, name: bytes, ctas: int, sizes: Sequence[int], repeats: int
    ) -> list[float]:
        """Seconds of one message of each size, back to back."""
        return await asyncio.to_thread(self._raw_nccl, name, ctas, sizes, repeats)

    def _raw_nccl(self, name: bytes, ctas: int, sizes: Sequence[int], repeats: int) -> list[float]:
        torch.cuda.set_device(_DEVICE)
        torch.cuda.synchronize()
        limit = time.monotonic() + 60
        sending = self._role is Role.PREFILL
        pair = Communicator(name, 0 if sending else 1, ctas=ctas, limit=limit)
        data = torch.randint(-128, 127, (max(sizes),), dtype=torch.int8, device=_DEVICE)
        stream = torch.cuda.current_stream()
        post = pair.send if sending else pair.recv
        results = [
            _timed(partial(post, data.data_ptr(), size, stream.cuda_stream, limit), repeats)
            for size in sizes
        ]
        pair.abort()
        return results

    async def export(self, num_bytes: int) -> tuple[bytes, int]:
        """A buffer for raw copies."""
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=_DEVICE)
        torch.cuda.synchronize()
        return export_memory(self._buffer.data_ptr())

    async def raw_copy(
        self, handle: bytes, offset: int, sizes: Sequence[int], repeats: int
    ) -> list[float]:
        """Seconds of one contiguous copy of each size into the other GPU."""
        data = torch.randint(-128, 127, (max(sizes),), dtype=torch.int8, device=_DEVICE)
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
            assert code == 0, f"copy failed: {code}"

        with torch.cuda.stream(stream):
            results = [_timed(partial(copy, size), repeats) for size in sizes]
        close_memory(base)
        return results

    # --- decode steps beside the transfer -------------------------------------------------------

    async def start_steps(self, num_bytes: int) -> None:
        """Decode: begin to run steps that read `num_bytes` of weights each, one after the other."""
        self._decoding = _Decoding(num_bytes)

    async def step_times(self, seconds: float) -> list[float]:
        """Decode: seconds of each step that ended within the next `seconds`."""
        assert self._decoding is not None
        return await asyncio.to_thread(self._decoding.sample, seconds)

    async def stop_steps(self) -> None:
        """Decode: no more steps."""
        assert self._decoding is not None
        await asyncio.to_thread(self._decoding.stop)
        self._decoding = None
        torch.cuda.empty_cache()


class _Decoding:
    """A thread that replays a graph of matrix-vector-like products, as a decode step is."""

    def __init__(self, num_bytes: int) -> None:
        shape = (num_bytes // (2 * 4096 * 4096), 4096, 4096)
        self._weights = torch.randn(shape, device=_DEVICE, dtype=torch.bfloat16)
        self._times: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def sample(self, seconds: float) -> list[float]:
        first = len(self._times)
        time.sleep(seconds)
        return self._times[first:]

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        x = torch.randn(64, 4096, device=_DEVICE, dtype=torch.bfloat16)
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


def _random_layers(layout: KVLayout, num_blocks: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(_DEVICE).manual_seed(seed)
    shape = (num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return [
        torch.randint(
            -32768, 32767, shape, dtype=torch.int16, device=_DEVICE, generator=generator
        ).view(torch.bfloat16)
        for _ in range(layout.num_layers)
    ]


def _fingerprint(layout: KVLayout) -> KVFingerprint:
    return KVFingerprint(
        model="random",
        weights="0",
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        rope="none",
    )


# --- processes ------------------------------------------------------------------------------------


def _child(role: Role, pipe: Connection) -> None:
    torch.cuda.set_device(_DEVICE)
    asyncio.run(_serve(Side(role), pipe))


async def _serve(side: Side, pipe: Connection) -> None:
    while True:
        try:
            name, args = await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        try:
            pipe.send((await getattr(side, name)(*args), None))
        except Exception as error:  # noqa: BLE001 - the parent has to know
            pipe.send((None, f"{type(error).__name__}: {error}"))


class Process:
    """The parent's handle of one side."""

    def __init__(self, role: Role, gpu: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        self._child = context.Process(target=_child, args=(role, other), daemon=True)
        self._child.start()
        del os.environ["CUDA_VISIBLE_DEVICES"]
        other.close()
        self.role = role

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid or 0

    def start(self, name: str, *args: Any) -> None:
        """Begin a command."""
        self._pipe.send((name, args))

    def result(self) -> Any:
        """Wait for the command that was begun. Raises RuntimeError with what went wrong there."""
        if not self._pipe.poll(_PATIENCE_S + 30):
            raise RuntimeError(f"{self.role} does not answer")
        result, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(f"{self.role}: {error}")
        return result

    def do(self, name: str, *args: Any) -> Any:
        """Run a command."""
        self.start(name, *args)
        return self.result()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._child.join(10)
        self._child.kill()
