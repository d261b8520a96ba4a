"""What HTTP connections carry beside one request after the other: offers to speak something else,
requests sent ahead, clients that leave or never finish."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from protocol.ids import Role
from tests.support.router_doors import Doors, MakeDoors, until
from tests.support.stub_workers import StubFleet

JAVA = "connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


class Raw:
    """A connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, dict]:
        """The next answer: status and body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await self.reader.readexactly(int(fields["content-length"]))
        return int(head.split()[1]), json.loads(body)


@contextlib.asynccontextmanager
async def connected(doors: Doors) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection(*doors.router.addresses.http.split(":"))
    async with asyncio.timeout(10):
        try:
            yield Raw(reader, writer)
        finally:
            writer.close()


def post(headers: str = "", **fields: object) -> bytes:
    body = json.dumps({"prompt": "hello there you", "max_tokens": 3} | fields)
    length = f"content-length: {len(body)}\r\n"
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{headers}{length}\r\n{body}".encode()


async def test_an_offer_of_http2_is_declined_and_the_body_read(doors: Doors) -> None:
    """Java's HttpClient offers h2c with every first request to a plain http:// address."""
    async with connected(doors) as raw:
        for _ in range(2):
            raw.writer.write(post(JAVA))
            status, answer = await raw.answer()
            assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        head, body = post(JAVA).split(b"\r\n\r\n")
        raw.writer.write(head + b"\r\n\r\n")
        await asyncio.sleep(0.05)
        raw.writer.write(body)
        assert (await raw.answer())[0] == 200
        raw.writer.write(f"GET /health HTTP/1.1\r\nhost: x\r\n{JAVA}\r\n".encode())
        assert await raw.answer() == (200, {"status": "ok"})


async def test_requests_sent_ahead_are_answered_in_order(doors: Doors) -> None:
    """The beginning of a head that comes with the end of a large body is not as large as both."""
    async with connected(doors) as raw:
        raw.writer.write(post(user="x" * 200_000) + post(max_tokens=2) + post(user="x" * 100_000))
        raw.writer.write(b"GET /health HTTP/1.1\r\nhost")
        answers = [await raw.answer() for _ in range(3)]
        assert [status for status, _ in answers] == [200] * 3
        assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [3, 2, 3]
        raw.writer.write(b": x\r\n\r\n")
        assert await raw.answer() == (200, {"status": "ok"})


async def test_a_client_that_sent_two_requests_and_left_has_neither_run(
    fleet: StubFleet, make_doors: MakeDoors
) -> None:
    worker = await fleet.add(Role.DECODE, gate=asyncio.Event())
    async with make_doors(fleet) as doors:
        async with connected(doors) as raw:
            raw.writer.write(post(stream=True) + post())
            await until(lambda: worker.running)
        await until(lambda: worker.cancelled)
        await until(lambda: doors.router.num_requests == 0)
        assert len(worker.submitted) == 1


async def test_who_never_ends_a_body_that_was_answered_is_hung_up_on(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.openai.connection.HEAD_S", 0.3)
    async with connected(doors) as raw:
        raw.writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert (await raw.answer())[0] == 404
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            while True:
                raw.writer.write(b"x")
                await raw.writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await raw.reader.readexactly(1)
