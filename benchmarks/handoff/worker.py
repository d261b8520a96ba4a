"""One worker of the hand-off benchmark: a sender or receiver without a model."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.handoff.ranks import Ranks
from benchmarks.handoff.raw_links import DEVICE, Decoding, Prompting, raw_copies, raw_messages
from cluster.gc_tuning import freeze_heap
from kv_transfer.config import TransferConfig
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.listeners import TransferReport
from kv_transfer.control.receiver import Receiver
from kv_transfer.control.sender import Sender
from kv_transfer.cuda.driver import export_memory
from kv_transfer.cuda.nccl import unique_id
from protocol.errors import ErrorInfo
from protocol.ids import RequestKey, Role, WorkerRef, new_epoch
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.messages import Commit, Grant, Ticket
from rpc.client import ClientPool
from rpc.server import ControlServer

SECRET = b"the benchmark's secret"
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One hand-off, as both workers know it."""

    key: RequestKey
    ticket: Ticket
    prefill: WorkerRef
    decode: WorkerRef
    source: tuple[int, ...]
    dest: tuple[int, ...]


def make_handoff(
    key: RequestKey,
    prefill: WorkerRef,
    decode: WorkerRef,
    source: tuple[int, ...],
    dest: tuple[int, ...],
) -> Handoff:
    """A hand-off with its ticket."""
    ticket = Ticket(
        key=key,
        sender_epoch=prefill.epoch,
        receiver_epoch=decode.epoch,
        num_blocks=len(dest),
        lifetime_s=300.0,
    ).signed(SECRET)
    return Handoff(key=key, ticket=ticket, prefill=prefill, decode=decode, source=source, dest=dest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """When a prompt's computation began and ended on the device (monotonic seconds)."""

    start: float
    end: float


@dataclass(slots=True)
class _Ends:
    """Times of events by key (monotonic seconds, one clock for all processes of a host)."""

    loop: asyncio.AbstractEventLoop
    times: dict[RequestKey, asyncio.Future[float]] = field(default_factory=dict)
    grants: dict[RequestKey, asyncio.Future[float]] = field(default_factory=dict)
    safe: set[RequestKey] = field(default_factory=set)

    def expect(self, key: RequestKey) -> None:
        self.times[key] = self.loop.create_future()
        self.grants[key] = self.loop.create_future()

    def granted(self, key: RequestKey, grant: Grant) -> None:
        self.grants[key].set_result(time.monotonic())

    def committed(self, key: RequestKey, result: Commit | TransferReport) -> None:
        self.times[key].set_result(time.monotonic())

    delivered = committed

    def sent(self, key: RequestKey) -> None:
        """Of running sequences, which are not measured."""

    def ended(self, key: RequestKey, error: ErrorInfo | None, *, uncertain: bool = False) -> None:
        code = "released" if error is None else f"{error.code.value}: {error.message}"
        for future in (self.times[key], self.grants[key]):
            if not future.done():
                future.set_exception(RuntimeError(code))
                future.exception()  # retrieved here: it may never be awaited

    def commit_announced(self, key: RequestKey, in_s: float) -> None:
        pass

    def blocks_safe(self, key: RequestKey, block_ids: tuple[int, ...]) -> None:
        self.safe.add(key)


class BenchWorker:
    """A worker whose methods are the commands of the pipe."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._clients = ClientPool(secret=SECRET)
        self._server: ControlServer | None = None
        self._ranks: Ranks | None = None
        self._end: Any = None
        self._decoding: Decoding | None = None
        self._prompting: Prompting | None = None

    async def build(
        self, layout: KVLayout, config: TransferConfig, apart: bool = False
    ) -> WorkerRef:
        """Replace the worker by one of this layout, its ranks distributed over the GPUs. `apart`:
        all ranks but the first are processes."""
        await self.drop()
        self._layout = layout
        self._ranks = await asyncio.to_thread(Ranks, layout, config, apart=apart)
        self._server = ControlServer(secret=SECRET)
        address = self._server.bind()
        ref = WorkerRef(
            worker_id=str(self._role), epoch=new_epoch(), role=self._role, address=address
        )
        self._events = _Ends(asyncio.get_running_loop())
        context = EndpointContext(
            ref=ref,
            layout=layout,
            fingerprint=_fingerprint(layout),
            secret=SECRET,
            ranks=self._ranks,
            clients=self._clients,
            config=config,
        )
        if self._role is Role.PREFILL:
            self._end = Sender(context, self._events)
        else:
            self._end = Receiver(context, self._events)
            await self._end.start()
        self._server.add(self._end.handlers())
        await self._server.start()
        freeze_heap()
        return ref

    async def drop(self) -> None:
        """Close the worker, free its memory."""
        if self._server is None:
            return
        await self._end.close()
        assert self._ranks is not None
        await asyncio.to_thread(self._ranks.close)
        await self._server.stop()
        self._server, self._end, self._ranks = None, None, None
        self._prompting = None
        gc.unfreeze()  # the heap was settled with all that in it
        gc.collect()
        torch.cuda.empty_cache()

    async def fill(self, blocks: Sequence[int], seed: int) -> None:
        """Random bits, the same on both workers for the same seed."""
        self._everywhere("fill", blocks, seed)

    async def fill_late(self, handoff: Handoff, seed: int) -> None:
        """Prefill: as `fill`, by a slow step whose blocks are pushed before it has begun."""
        blocks = handoff.source
        steps = self._everywhere("fill_late", blocks, seed)
        self._end.push(handoff.key, blocks, 0, after=steps[0])
        self._end.commit(handoff.key, (1,))
        await asyncio.wait_for(self._events.times[handoff.key], PATIENCE_S)

    async def wrong_layers(self, blocks: Sequence[int], seed: int, coded: bool = False) -> int:
        """Layers, over all ranks, that differ from what `fill` wrote on the other worker."""
        return sum(self._everywhere("wrong_layers", blocks, seed, coded))

    def _everywhere(self, name: str, *args: Any) -> list[Any]:
        assert self._ranks is not None
        return self._ranks.everywhere(name, *args)

    async def meet(self, decode: WorkerRef) -> None:
        """Prefill: warm up the links."""
        await self._end.warm_up(decode)

    async def expect(self, handoffs: Sequence[Handoff]) -> None:
        for handoff in handoffs:
            self._events.expect(handoff.key)
            self._end.expect(handoff.key, handoff.ticket, handoff.decode)

    async def reserve(self, handoffs: Sequence[Handoff]) -> None:
        """Decode: accept requests and grant their blocks."""
        for handoff in handoffs:
            self._events.expect(handoff.key)
            self._end.offer(handoff.key, handoff.ticket, handoff.prefill)
            await self._end.reserve(handoff.key, (handoff.dest,), 0)

    async def send(self, handoffs: Sequence[Handoff], window: int) -> list[tuple[float, float]]:
        """Prefill: push and commit, `window` at a time; (push, commit acknowledged) of each."""
        slots = asyncio.Semaphore(window)

        async def one(handoff: Handoff) -> tuple[float, float]:
            await self._events.grants[handoff.key]
            async with slots:
                start = time.monotonic()
                self._end.push(handoff.key, handoff.source, 0)
                self._end.commit(handoff.key, (1,))
                return start, await self._events.times[handoff.key]

        async with asyncio.timeout(
            PATIENCE_S
        ):  # one timer for all, to keep timers out of the measurement
            return list(await asyncio.gather(*(one(handoff) for handoff in handoffs)))

    async def prompts(self, handoffs: Sequence[Handoff], chunk: int) -> list[Prompted]:
        """Prefill: one request after the other, its prompt in chunks of `chunk` blocks. Each chunk
        is pushed when it is launched, as a worker does."""
        if self._prompting is None:
            assert self._ranks is not None
            pools = (rank.pool for rank in self._ranks.near())
            events = [pool.step_events for pool in pools if pool.step_events is not None]
            self._prompting = Prompting(self._layout.num_layers, events)
        results = []
        for handoff in handoffs:
            await asyncio.wait_for(self._events.grants[handoff.key], PATIENCE_S)
            times = await asyncio.to_thread(
                self._prompt, self._prompting, handoff, chunk, asyncio.get_running_loop()
            )
            await asyncio.wait_for(self._events.times[handoff.key], PATIENCE_S)
            results.append(times)
        return results

    async def compute(self, tokens: int, chunk: int) -> float:
        """Prefill: seconds of a prompt's computation with nothing beside it."""
        assert self._prompting is not None
        _, origin = self._prompting.now()
        for _ in range(0, tokens, chunk):
            _, done = self._prompting.launch(min(chunk, tokens))
        done.synchronize()
        return float(origin.elapsed_time(done)) / 1e3

    def _prompt(
        self,
        prompting: Prompting,
        handoff: Handoff,
        chunk: int,
        loop: asyncio.AbstractEventLoop,
    ) -> Prompted:
        """What a step thread does for one prompt: launch one step ahead of the one it waits for."""
        began, origin = prompting.now()
        waiting: list[torch.cuda.Event] = []
        for first in range(0, len(handoff.source), chunk):
            blocks = handoff.source[first : first + chunk]
            step, done = prompting.launch(len(blocks) * self._layout.block_size)
            loop.call_soon_threadsafe(
                partial(self._end.push, handoff.key, blocks, first, after=step)
            )
            waiting.append(done)
            if len(waiting) > 1:
                waiting.pop(0).synchronize()
        waiting[0].synchronize()
        loop.call_soon_threadsafe(self._end.commit, handoff.key, (1,))
        return Prompted(start=began, end=began + origin.elapsed_time(waiting[0]) / 1e3)

    async def commits(self, keys: Sequence[RequestKey]) -> list[float]:
        """Decode: when it took ownership of each."""
        return [await asyncio.wait_for(self._events.times[key], PATIENCE_S) for key in keys]

    async def outcomes(self, keys: Sequence[RequestKey]) -> list[str]:
        """How each ended: "committed", "released" or an error's code."""
        done = (asyncio.wait_for(self._events.times[key], PATIENCE_S) for key in keys)
        results = await asyncio.gather(*done, return_exceptions=True)
        return [
            str(r).partition(":")[0] if isinstance(r, BaseException) else "committed"
            for r in results
        ]

    async def end(self, key: RequestKey) -> None:
        """End a hand-off that is not needed any more."""
        await self._end.end(key, True)

    async def lose(self, epoch: int) -> None:
        """The other worker left or expired."""
        await self._end.peer_lost(epoch)

    async def backends(self) -> list[str]:
        """The backends that moved any data."""
        assert self._ranks is not None
        return sorted({way for rank in self._ranks.near() for way in rank.plane.open_backends})

    async def relinked(self) -> int:
        """How often links were replaced."""
        return int(self._end.stats.relinked)

    async def loop_seconds(self) -> float:
        """Processor time that the event loop's thread has used so far."""
        return time.thread_time()

    async def safe(self, keys: Sequence[RequestKey]) -> list[RequestKey]:
        """Decode: those whose blocks were released."""
        return [key for key in keys if key in self._events.safe]

    # --- raw links ------------------------------------------------------------------------------

    async def nccl_name(self) -> bytes:
        """A name for a communicator."""
        torch.cuda.synchronize()
        return unique_id()

    async def raw_nccl(
        self, name: bytes, ctas: int, sizes: Sequence[int], repeats: int
    ) -> list[float]:
        """Seconds of one message of each size, back to back."""
        return await asyncio.to_thread(
            raw_messages, name, ctas, sizes, repeats, sending=self._role is Role.PREFILL
        )

    async def export(self, num_bytes: int) -> tuple[bytes, int]:
        """A buffer for raw copies."""
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        return export_memory(self._buffer.data_ptr())

    async def raw_copy(
        self, handle: bytes, offset: int, sizes: Sequence[int], repeats: int
    ) -> list[float]:
        """Seconds of one contiguous copy of each size into the other GPU."""
        return raw_copies(handle, offset, sizes, repeats)

    # --- decode steps beside the transfer -------------------------------------------------------

    async def start_steps(self, num_bytes: int) -> None:
        """Decode: begin to run steps that read `num_bytes` of weights each, one after the other."""
        self._decoding = Decoding(num_bytes)

    async def step_times(self, seconds: float) -> list[float]:
        """Decode: seconds of each step that ended within the next `seconds`."""
        assert self._decoding is not None
        return await asyncio.to_thread(self._decoding.sample, seconds)

    async def stop_steps(self) -> None:
        """Decode: stop the steps."""
        assert self._decoding is not None
        await asyncio.to_thread(self._decoding.stop)
        self._decoding = None
        torch.cuda.empty_cache()


def _fingerprint(layout: KVLayout) -> KVFingerprint:
    return KVFingerprint(
        model="random",
        weights="0",
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        rope="none",
    )
