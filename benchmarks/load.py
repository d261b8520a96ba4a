"""Send requests: a closed loop of N clients, or arrivals at given times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.http_stream import Connection
from benchmarks.measure import Result, read_answer
from benchmarks.workload import Ask, Style


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under load."""

    url: str
    style: Style
    timeout_s: float = 600.0
    api_key: str = ""

    def connect(self) -> Connection:
        """A connection of one client."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return Connection(self.url, headers)


async def closed_loop(
    target: Target, asks: Sequence[Ask], *, concurrency: int, first_number: int = 0
) -> list[Result]:
    """`concurrency` clients; each sends its next request when its last has ended."""
    queue = list(enumerate(asks, start=first_number))
    queue.reverse()

    async def client() -> list[Result]:
        connection, results = target.connect(), []
        try:
            while queue:
                number, ask = queue.pop()
                results.append(await _one(target, connection, ask, number))
        finally:
            connection.close()
        return results

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client()) for _ in range(min(concurrency, len(asks)))]
    return [result for task in clients for result in task.result()]


async def timed_arrivals(target: Target, asks: Sequence[Ask]) -> list[Result]:
    """Every request at its own time, however many are in flight (an open loop)."""
    began = time.perf_counter()
    idle: list[Connection] = []

    async def one(number: int, ask: Ask) -> Result:
        await asyncio.sleep(began + ask.at - time.perf_counter())
        connection = idle.pop() if idle else target.connect()
        result = await _one(target, connection, ask, number)
        idle.append(connection)
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number, ask)) for number, ask in enumerate(asks)]
    finally:
        for connection in idle:
            connection.close()
    return [task.result() for task in tasks]


async def _one(target: Target, connection: Connection, ask: Ask, number: int) -> Result:
    style = target.style
    body = style.body(ask, number)
    sent = time.perf_counter()
    try:
        answer = await connection.post(style.path, body, timeout_s=target.timeout_s)
    except (TimeoutError, OSError) as error:
        reason = "timed out" if isinstance(error, TimeoutError) else str(error)
        return Result(sent=sent, ended=time.perf_counter(), error=reason)
    expected = ask.output_tokens if style.ignore_eos else None
    return read_answer(answer, expected_tokens=expected)
