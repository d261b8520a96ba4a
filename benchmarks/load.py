"""Send requests: a closed loop of N clients, or arrivals at given times.

Answers are parsed after the run, because parsing would delay the timestamps of others; so would the
garbage collector, which is off during a run.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from benchmarks.front_end.grpc_stream import GrpcConnection, read_messages
from benchmarks.front_end.http_stream import Connection
from benchmarks.measure import Result, read_answer
from benchmarks.workload import Ask, Style
from cluster.client import ClientTls

#: Prefix of a gRPC address.
GRPC = "grpc://"

#: Reads an answer that has come.
Reader = Callable[[], Result]


class Client(Protocol):
    """One connection of one client."""

    async def ask(self, ask: Ask, number: int) -> Reader:
        """Send request `number` and wait for its end; failures are in the result."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


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
        return GrpcClient(self) if self.url.startswith(GRPC) else HttpClient(self)

    def expected_tokens(self, ask: Ask) -> int | None:
        """How many output tokens an answer must have, where that is known."""
        return ask.output_tokens if self.style.ignore_eos else None


class HttpClient:
    """Asks over HTTP."""

    def __init__(self, target: Target) -> None:
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._target = target
        self._connection = Connection(target.url, headers, target.tls)

    async def ask(self, ask: Ask, number: int) -> Reader:
        """Send request `number` and wait for its end; failures are in the result."""
        target, style = self._target, self._target.style
        body = style.body(ask, number)
        sent = time.perf_counter()
        try:
            answer = await self._connection.post(style.path, body, timeout_s=target.timeout_s)
        except (TimeoutError, OSError) as error:
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            failed = Result(sent=sent, ended=time.perf_counter(), error=reason)
            return lambda: failed
        return partial(read_answer, answer, expected_tokens=target.expected_tokens(ask))

    async def close(self) -> None:
        """Disconnect."""
        self._connection.close()


class GrpcClient:
    """Asks over gRPC."""

    def __init__(self, target: Target) -> None:
        self._target = target
        address = target.url.removeprefix(GRPC)
        self._connection = GrpcConnection(address, target.api_key, target.tls)

    async def ask(self, ask: Ask, number: int) -> Reader:
        """Send request `number` and wait for its end; failures are in the result."""
        target = self._target
        body = target.style.body(ask, number)
        answer = await self._connection.generate(body, timeout_s=target.timeout_s)
        return partial(read_messages, answer, expected_tokens=target.expected_tokens(ask))

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()


@contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def closed_loop(
    target: Target, asks: Sequence[Ask], *, concurrency: int, first_number: int = 0
) -> list[Result]:
    """`concurrency` clients; each sends its next request when its last has ended."""
    queue = list(enumerate(asks, start=first_number))
    queue.reverse()

    async def run() -> list[Reader]:
        client, readers = target.connect(), []
        try:
            while queue:
                number, ask = queue.pop()
                readers.append(await client.ask(ask, number))
        finally:
            await client.close()
        return readers

    with _collector_off():
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(run()) for _ in range(min(concurrency, len(asks)))]
    return [read() for task in clients for read in task.result()]


async def timed_arrivals(target: Target, asks: Sequence[Ask]) -> list[Result]:
    """Every request at its own time, however many are in flight (an open loop)."""
    idle: list[Client] = []

    async def one(number: int, ask: Ask) -> Reader:
        await asyncio.sleep(began + ask.at - time.perf_counter())
        client = idle.pop() if idle else target.connect()
        read = await client.ask(ask, number)
        idle.append(client)
        return read

    try:
        with _collector_off():
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number, ask)) for number, ask in enumerate(asks)]
    finally:
        for client in idle:
            await client.close()
    return [task.result()() for task in tasks]
