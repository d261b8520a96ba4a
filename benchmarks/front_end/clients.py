"""Clients of a stream of tokens: over HTTP, over gRPC, straight from the workers."""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from benchmarks.front_end.stub_router import read_refs
from benchmarks.front_end.stub_worker import SECRET
from cluster.bench.grpc_stream import GrpcConnection, request_of
from cluster.bench.http_stream import HttpClientConnection
from cluster.bench.load import Reader
from cluster.bench.measure import Result, read_answer
from protocol.ids import RequestKey, Role
from protocol.messages import EventBatch, Submit, Subscribe
from protocol.sampling import SamplingParams
from rpc.client import ControlClient
from rpc.methods import EVENTS, SUBMIT

PROMPT = "The front end of a system that serves large language models, seen from the outside."
_TIMEOUT_S = 120.0


class Client(Protocol):
    """Sends requests one way."""

    async def open(self) -> None:
        """Connect."""

    async def ask(self, tokens: int) -> Reader:
        """One request for `tokens` tokens; the result has an error if fewer arrive."""

    async def close(self) -> None:
        """Disconnect."""


class SseClient:
    """Server-sent events, a connection for each request in flight."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[HttpClientConnection] = []

    async def open(self) -> None:
        """Requests connect."""

    async def ask(self, tokens: int) -> Reader:
        connection = self._idle.pop() if self._idle else HttpClientConnection(self._url)
        body = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        answer = await connection.post("/v1/completions", body, timeout_s=_TIMEOUT_S)
        self._idle.append(connection)
        return partial(read_answer, answer, expected_tokens=tokens)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()


class GrpcClient:
    """baton.v1.Inference/Generate over a few connections."""

    def __init__(self, address: str, *, channels: int) -> None:
        self._connections = [GrpcConnection(address, timeout_s=_TIMEOUT_S) for _ in range(channels)]
        self._turns = itertools.cycle(self._connections)

    async def open(self) -> None:
        """The first requests connect."""

    async def ask(self, tokens: int) -> Reader:
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}
        return await next(self._turns).ask(request_of(body), tokens)

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


class DirectClient:
    """Straight from the workers over the control protocol, as a router does."""

    def __init__(self, workers: str) -> None:
        self._refs = {ref.role: ref for ref in read_refs(workers)}
        self._clients = {
            role: ControlClient(ref.address, secret=SECRET) for role, ref in self._refs.items()
        }
        self._numbers = itertools.count()
        self._streams: dict[RequestKey, tuple[list[float], asyncio.Event]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Open both event streams."""
        ready = [asyncio.Event() for _ in self._clients]
        for client, event in zip(self._clients.values(), ready, strict=True):
            self._tasks.append(asyncio.create_task(self._follow(client, event)))
        for event in ready:
            await event.wait()

    async def ask(self, tokens: int) -> Reader:
        """Submit to both and wait for the last token."""
        key = RequestKey(f"direct-{next(self._numbers)}")
        times, done = self._streams[key] = ([], asyncio.Event())
        submit = Submit(
            key=key,
            router_id="direct",
            prompt_ids=tuple(range(1000, 1016)),
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0),
            time_left_s=_TIMEOUT_S,
        )
        sent = time.perf_counter()
        await asyncio.gather(
            *(
                client.call(SUBMIT, replace(submit, peer=self._other(role)), timeout_s=_TIMEOUT_S)
                for role, client in self._clients.items()
            )
        )
        await done.wait()
        result = Result(sent=sent, ended=times[-1], chunk_times=tuple(times), output_tokens=tokens)
        return lambda: result

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    def _other(self, role: Role) -> Any:
        return self._refs[Role.DECODE if role is Role.PREFILL else Role.PREFILL]

    async def _follow(self, client: ControlClient, ready: asyncio.Event) -> None:
        async for batch in client.stream(EVENTS, Subscribe(router_id="direct")):
            ready.set()
            self._take(batch)

    def _take(self, batch: EventBatch) -> None:
        now = time.perf_counter()
        for token in batch.tokens:
            times, done = self._streams[token.key]
            times.append(now)
            if token.finish is not None:
                done.set()
