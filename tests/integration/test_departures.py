"""A client that disconnects at any moment, over HTTP or gRPC: its work ends within a step, its
blocks come back, and other workers do not notice.

Each phase is held still while the client leaves: a step thread or the wire waits for a gate.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kv_transfer.backends.tcp import TcpLink
from observability import metrics
from protocol.errors import ErrorCode
from tests.support.both_front_ends import BothFrontEnds, Said
from tests.support.pair import Brake
from tests.support.router_front_ends import until
from tests.support.stack import Stack, running_stack
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import write_model_text
from tests.support.wire_requests import to_message
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import FAILED, FINISHED
from worker_runtime.step_loop import StepLoop

CHUNK = 32
CONFIG = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=CHUNK, enable_prefix_caching=False)
#: Decode has room for one of these at a time.
LONG = [40 + i % 300 for i in range(300)]
SHORT = [41, 42, 43]
OUTPUT = 60
PREFILL, DECODE, WIRE = "prefill-0-steps", "decode-0-steps", "wire"

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Gates:
    """What threads wait for: a worker's steps, and the bytes between workers."""

    def __init__(self) -> None:
        self._open = {name: threading.Event() for name in (PREFILL, DECODE, WIRE)}
        self._left = dict.fromkeys(self._open, 0)  # how often each lets through before it closes
        self.open_all()

    def close(self, name: str, *, after: int = 0) -> None:
        self._left[name] = after
        self._open[name].clear()

    def open_all(self) -> None:
        for gate in self._open.values():
            gate.set()

    def pass_through(self, name: str) -> None:
        gate = self._open.get(name)
        if gate is None or gate.is_set():
            return
        if self._left[name] == 0:
            assert gate.wait(60), f"the gate of {name} did not open"
        else:
            self._left[name] -= 1


@contextmanager
def gated() -> Iterator[Gates]:
    """Every step loop and link of this process goes through the gates."""
    gates, launch, move = Gates(), StepLoop._launch, TcpLink._move

    def slow_launch(self: StepLoop[Any], batch: Any, now: float) -> None:
        gates.pass_through(self._thread.name)
        launch(self, batch, now)

    def slow_move(self: TcpLink, what: str, *rest: Any) -> None:
        if what == "send":
            gates.pass_through(WIRE)
        move(self, what, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLoop, "_launch", slow_launch)
        patch.setattr(TcpLink, "_move", slow_move)
        yield gates
        gates.open_all()


@dataclass
class World:
    """One prefill and one decode worker behind a router, and their gates."""

    stack: Stack
    front_ends: BothFrontEnds
    gates: Gates
    other: asyncio.Task[Said] | None = None  # what the departing client waits behind
    brake: Brake | None = None

    @property
    def prefill(self) -> Any:
        return self.stack.pair.prefills[0].status()

    @property
    def decode(self) -> Any:
        return self.stack.pair.decodes[0].status()

    def release(self) -> None:
        """Let everything go on."""
        self.gates.open_all()
        if self.brake is not None:
            self.brake.release()

    def gauge(self, metric: Any) -> float:
        return self.stack.router.metrics.value(metric)

    def cancelled(self, front_end: str) -> float:
        return self.stack.router.metrics.value(
            metrics.REQUEST_FAILURES, door=front_end, code=ErrorCode.CANCELLED.value
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("tiny")
    write_model_text(folder)
    save_tiny_llama(folder, vocab_size=512)
    options: dict[str, Any] = {"prefill_config": CONFIG, "decode_config": CONFIG}
    with gated() as gates:
        async with running_stack(str(folder), decode_blocks=32, **options) as stack:
            front_ends = BothFrontEnds(stack.http, stack.grpc)
            await front_ends.ask(**ask(SHORT, max_tokens=2))
            await stack.pair.idle()
            yield World(stack, front_ends, gates)
            await front_ends.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def settled(world: World) -> AsyncIterator[None]:
    """Whatever a test leaves behind is gone before the next."""
    world.other = world.brake = None
    yield
    world.release()
    if world.other is not None:
        world.other.cancel()
    await world.stack.pair.idle()


# --- phases: each returns once the request that `begin` sends is in it ----------------------------

Begin = Callable[[], Awaitable[None]]


async def queued(world: World, begin: Begin) -> None:
    """In the router: what went before leaves no room at decode."""
    world.gates.close(PREFILL, after=1)
    world.other = asyncio.create_task(world.front_ends.over_http(ask(LONG)))
    await until(lambda: world.prefill.load.running == 1)
    await begin()
    await until(lambda: world.gauge(metrics.QUEUED_REQUESTS) == 1)


async def waiting_for_room(world: World, begin: Begin) -> None:
    """At both workers: decode has no blocks for it while it goes on with another."""
    world.brake = Brake(world.stack.pair.decodes[0], OUTPUT // 2)
    world.other = asyncio.create_task(world.front_ends.over_http(ask(LONG)))
    await until(lambda: world.decode.load.running == 1 and world.gauge(metrics.REQUESTS_RUNNING))
    await begin()
    await until(lambda: world.decode.load.waiting == 1 and world.prefill.load.waiting == 1)


async def prefilling(world: World, begin: Begin) -> None:
    """Between two chunks of its prompt."""
    steps = world.prefill.steps
    world.gates.close(PREFILL, after=3)
    await begin()
    await until(lambda: world.prefill.steps == steps + 3)
    assert world.prefill.load.running == 1


async def transferring(world: World, begin: Begin) -> None:
    """All of it is computed, none of it has arrived."""
    steps = world.prefill.steps
    world.gates.close(WIRE)
    await begin()
    await until(lambda: world.prefill.steps >= steps + len(LONG) // CHUNK + 1)
    await until(lambda: world.decode.load.held_blocks > 0)


async def decoding(world: World, begin: Begin) -> None:
    """Some of its output is there, and prefill has heard that decode has its KV."""
    steps = world.decode.steps
    world.gates.close(DECODE, after=5)
    await begin()
    await until(lambda: world.decode.steps == steps + 5)
    await until(lambda: world.prefill.load.running == 0)
    assert world.decode.load.running == 1


PHASES = [queued, waiting_for_room, prefilling, transferring, decoding]


def ask(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "temperature": 0.0,
        **fields,
    }


class HttpClient:
    """A bare socket, to leave as clients do. `abort`: without a word (RST)."""

    def __init__(self, world: World, body: dict[str, Any], *, abort: bool) -> None:
        self._address = world.stack.http.split(":")
        self._body = json.dumps(body).encode()
        self._abort = abort

    async def begin(self) -> None:
        host, port = self._address
        self._socket = socket.create_connection((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self._body)}"
        self._socket.sendall(f"{head}\r\n\r\n".encode() + self._body)

    async def leave(self) -> None:
        if self._abort:
            linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._socket.close()


class GrpcClient:
    """A call that is cancelled, or whose channel is closed (`abort`)."""

    def __init__(self, world: World, body: dict[str, Any], *, abort: bool) -> None:
        self._address = world.stack.grpc
        self._inference = world.front_ends.inference
        self._request = to_message(body)
        self._abort = abort
        self._channel: grpc.aio.Channel | None = None

    async def begin(self) -> None:
        stub = self._inference
        if self._abort:
            self._channel = grpc.aio.insecure_channel(self._address)
            stub = type(stub)(self._channel)
        self._call = stub.Generate(self._request)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for _ in self._call:
                pass

    async def leave(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        else:
            self._call.cancel()
        await self._reader


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize(
    ("stream", "abort"),
    [(True, False), (False, False), (True, True)],
    ids=["streamed", "whole", "vanishes"],
)
@pytest.mark.parametrize("front_end", ["http", "grpc"])
async def test_work_for_a_client_that_left_ends_within_a_step(
    world: World,
    front_end: str,
    abort: bool,
    stream: bool,
    phase: Callable[[World, Begin], Awaitable[None]],
) -> None:
    kind = HttpClient if front_end == "http" else GrpcClient
    client = kind(world, ask(LONG, stream=stream), abort=abort)
    before = world.cancelled(front_end), ended(world)
    await phase(world, client.begin)
    others = 0 if world.other is None else 1
    decode_steps = world.decode.steps

    await client.leave()
    # Told at once, though every step of the phase still stands.
    await until(lambda: world.stack.router.num_requests == others)
    await until(lambda: world.cancelled(front_end) == before[0] + 1)
    await until(lambda: world.gauge(metrics.QUEUED_REQUESTS) == 0)
    if phase is decoding:  # its worker has heard of it before the next step
        await until(lambda: world.stack.pair.decodes[0].inbox.age() > 0.0)

    world.release()
    if world.other is not None:
        said = await world.other
        assert (len(said.only.ids), said.only.finish) == (OUTPUT, "length")
    await world.stack.pair.idle()
    # Nothing of it went on, and on no worker did it count as finished.
    assert world.decode.steps - decode_steps <= 3 + others * OUTPUT
    outcomes = [after - then for after, then in zip(ended(world), before[1], strict=True)]
    handed_over = int(phase is decoding)
    assert outcomes == [others + handed_over, others, 0, 0]
    for gauge in (metrics.REQUESTS_RUNNING, metrics.REQUESTS_WAITING):
        assert world.gauge(gauge) == 0
    said = await world.front_ends.over_http(ask(SHORT, max_tokens=3))
    assert len(said.only.ids) == 3


def ended(world: World) -> tuple[int, int, int, int]:
    """Requests that each worker finished, and that either of them failed."""
    prefill, decode = world.prefill.counters, world.decode.counters
    return prefill[FINISHED], decode[FINISHED], prefill[FAILED], decode[FAILED]
