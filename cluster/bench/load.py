"""Send requests: a closed loop of N clients, or arrivals at given times (an open loop).

Requests are made before a run and answers are parsed after it, because both would delay the
timestamps of others; so would the garbage collector, which is off during a run.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from cluster.bench.grpc_stream import GrpcConnection, request_of
from cluster.bench.http_stream import HttpClientConnection, to_json
from cluster.bench.measure import Result, read_answer
from cluster.bench.workload import Ask, Style
from cluster.client_tls import ClientTls

#: Prefix of a gRPC address.
GRPC = "grpc://"
#: How often the event loop's lag is looked at.
_PROBE_S = 0.005

#: Reads an answer that has come.
Reader = Callable[[], Result]


class Client(Protocol):
    """One connection of one client."""

    async def ask(self, request: Any, expected_tokens: int | None) -> Reader:
        """Send a request made by `Target.request` and wait for its end; failures are in the
        result."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under load. `url` is http://... of any OpenAI server, or grpc://host:port."""

    url: str
    style: Style
    timeout_s: float = 600.0
    api_key: str = ""
    tls: ClientTls | None = None

    def connect(self) -> Client:
        """A connection of one client."""
        if not self.url.startswith(GRPC):
            return HttpClient(self)
        address = self.url.removeprefix(GRPC)
        return GrpcConnection(address, timeout_s=self.timeout_s, api_key=self.api_key, tls=self.tls)

    def request(self, ask: Ask, number: int) -> Any:
        """Request `number` as its client sends it."""
        body = self.style.body(ask, number)
        return request_of(body) if self.url.startswith(GRPC) else to_json(body)

    def expected_tokens(self, ask: Ask) -> int | None:
        """How many output tokens an answer must have, where that is known."""
        return ask.output_tokens if self.style.ignore_eos else None


class HttpClient:
    """Asks over HTTP."""

    def __init__(self, target: Target) -> None:
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._target = target
        self._connection = HttpClientConnection(target.url, headers, target.tls)

    async def ask(self, request: bytes, expected_tokens: int | None) -> Reader:
        target = self._target
        sent = time.perf_counter()
        try:
            answer = await self._connection.post(
                target.style.path, request, timeout_s=target.timeout_s
            )
        except (TimeoutError, OSError) as error:
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            failed = Result(sent=sent, ended=time.perf_counter(), error=reason)
            return lambda: failed
        return partial(read_answer, answer, expected_tokens=expected_tokens)

    async def close(self) -> None:
        self._connection.close()


@dataclass(slots=True)
class Monitor:
    """What a run tells while it goes on: `on_end` is called as each request ends, `lags` gets the
    seconds by which the generator's event loop is late, looked at every 5 ms. Timestamps of tokens
    are wrong by no more than that."""

    on_end: Callable[[], None] = lambda: None
    lags: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Measure the lag until cancelled."""
        while True:
            due = time.perf_counter() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            self.lags.append(max(0.0, time.perf_counter() - due))


@contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def closed_loop(
    target: Target,
    asks: Sequence[Ask],
    *,
    concurrency: int,
    first_number: int = 0,
    monitor: Monitor | None = None,
) -> list[Result]:
    """`concurrency` clients; each sends its next request when its last has ended."""
    monitor = monitor or Monitor()
    queue = [
        (target.request(ask, number), target.expected_tokens(ask))
        for number, ask in enumerate(asks, start=first_number)
    ]
    queue.reverse()

    async def run() -> list[Reader]:
        client, readers = target.connect(), []
        try:
            while queue:
                readers.append(await client.ask(*queue.pop()))
                monitor.on_end()
        finally:
            await client.close()
        return readers

    with _collector_off():
        watch = asyncio.create_task(monitor.watch())
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(run()) for _ in range(min(concurrency, len(asks)))]
        watch.cancel()
    return [read() for task in clients for read in task.result()]


async def timed_arrivals(
    target: Target, asks: Sequence[Ask], *, first_number: int = 0, monitor: Monitor | None = None
) -> list[Result]:
    """Every request at its own time, however many are in flight (an open loop)."""
    monitor = monitor or Monitor()
    idle: list[Client] = []
    requests = [target.request(ask, n) for n, ask in enumerate(asks, start=first_number)]

    async def one(request: Any, ask: Ask) -> Reader:
        await asyncio.sleep(began + ask.at - time.perf_counter())
        client = idle.pop() if idle else target.connect()
        read = await client.ask(request, target.expected_tokens(ask))
        idle.append(client)
        monitor.on_end()
        return read

    try:
        with _collector_off():
            began = time.perf_counter()
            watch = asyncio.create_task(monitor.watch())
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(one(request, ask))
                    for request, ask in zip(requests, asks, strict=True)
                ]
            watch.cancel()
    finally:
        for client in idle:
            await client.close()
    return [task.result()() for task in tasks]
