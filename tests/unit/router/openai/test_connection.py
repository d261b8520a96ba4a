"""Connections: how many, and what they carry beside one request after the other: offers to speak
something else, requests sent ahead, clients that leave, never finish or never read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from observability import metrics
from protocol.errors import Cancelled
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.openai.exchange import cancelled_when_gone
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, until
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
async def connected(front_ends: FrontEnds) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection(*front_ends.router.addresses.http.split(":"))
    async with asyncio.timeout(60):
        try:
            yield Raw(reader, writer)
        finally:
            writer.close()


def post(headers: str = "", **fields: object) -> bytes:
    body = json.dumps({"prompt": "hello there you", "max_tokens": 3} | fields)
    length = f"content-length: {len(body)}\r\n"
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{headers}{length}\r\n{body}".encode()


async def test_an_offer_of_http2_is_declined_and_the_body_read(front_ends: FrontEnds) -> None:
    """Java's HttpClient offers h2c with every first request to a plain http:// address."""
    async with connected(front_ends) as raw:
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


async def test_a_body_behind_an_offer_is_never_another_request(front_ends: FrontEnds) -> None:
    inner = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    length = b"content-length: %d\r\n\r\n" % len(inner)
    async with connected(front_ends) as raw:
        raw.writer.write(head[:-9])  # in the middle of the name
        await asyncio.sleep(0.05)
        raw.writer.write(head[-9:] + length + inner)
        answers = await raw.reader.read()  # to the end
    assert answers.startswith(b"HTTP/1.1 400 ")
    assert answers.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_over_http_1_0_has_no_chunks(front_ends: FrontEnds, stream: bool) -> None:
    """Proxies like nginx speak it to servers by default."""
    async with connected(front_ends) as raw:
        raw.writer.write(post(stream=stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await raw.reader.read()).partition(b"\r\n\r\n")  # to the end
    assert b"transfer-encoding" not in head.lower()
    assert b"\r\nconnection: close" in head
    if stream:
        events = body.decode().split("\n\n")
        assert (events[-2], events[-1]) == ("data: [DONE]", "")
        assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])
    else:
        assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
        assert json.loads(body)["usage"]["completion_tokens"] == 3


async def test_what_is_not_http_is_refused_and_not_logged(
    front_ends: FrontEnds, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(front_ends) as raw:
        raw.writer.write(b"nonsense\r\n\r\n")
        status, answer = await raw.answer()
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert caplog.records == []


@pytest.mark.parametrize("pause", [False, True])
async def test_a_head_has_a_bound_however_it_comes(front_ends: FrontEnds, pause: bool) -> None:
    """In one read or in several, in one line or in many, and not the body behind it."""
    for size, status in ((60_000, 200), (70_000, 400), (200_000, 400)):
        for line in (
            f"x-a: {'x' * size}\r\n",
            "".join("x-a: " + "x" * 900 + "\r\n" for _ in range(size // 900)),
        ):
            async with connected(front_ends) as raw:
                head = post(line, user="y" * 100_000)
                raw.writer.write(head[:20_000] if pause else head)
                if pause:
                    await asyncio.sleep(0.02)
                    raw.writer.write(head[20_000:])
                answered, answer = await raw.answer()
            assert answered == status
            if status == 400:
                assert "head is larger" in answer["error"]["message"]


async def test_what_is_not_http_gets_no_answer_inside_another(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, delay_s=0.02)
    async with make_front_ends(fleet) as front_ends, connected(front_ends) as raw:
        raw.writer.write(post(stream=True, max_tokens=400))
        begun = await raw.reader.readuntil(b"data: ")
        raw.writer.write(b"nonsense\r\n\r\n")
        rest = await raw.reader.read()  # to the end
        assert (begun.count(b"HTTP/1.1"), rest.count(b"HTTP/1.1")) == (1, 0)
        await until(lambda: worker.cancelled)


async def test_requests_sent_ahead_are_answered_in_order(front_ends: FrontEnds) -> None:
    """The beginning of a head that comes with the end of a large body is not as large as both."""
    async with connected(front_ends) as raw:
        raw.writer.write(post(user="x" * 200_000) + post(max_tokens=2) + post(user="x" * 100_000))
        raw.writer.write(b"GET /health HTTP/1.1\r\nhost")
        answers = [await raw.answer() for _ in range(3)]
        assert [status for status, _ in answers] == [200] * 3
        assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [3, 2, 3]
        raw.writer.write(b": x\r\n\r\n")
        assert await raw.answer() == (200, {"status": "ok"})


async def test_who_waits_for_leave_to_send_a_body_and_gets_an_answer_sends_neither(
    front_ends: FrontEnds,
) -> None:
    """A client may go on with its next request then, which must not be taken for the body."""
    async with connected(front_ends) as raw:
        for path in ("/v1/completions", "/nowhere"):
            head, body = post("expect: 100-continue\r\n").split(b"\r\n\r\n")
            raw.writer.write(head.replace(b"/v1/completions", path.encode()) + b"\r\n\r\n")
            if path == "/v1/completions":
                assert await raw.reader.readline() == b"HTTP/1.1 100 Continue\r\n"
                assert await raw.reader.readline() == b"\r\n"
                raw.writer.write(body)
                assert (await raw.answer())[0] == 200
        answer = await raw.reader.read()  # to the end
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert b"\r\nconnection: close\r\n" in answer


async def test_who_sends_thousands_of_requests_ahead_is_hung_up_on(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, gate=asyncio.Event())
    async with make_front_ends(fleet) as front_ends:
        async with connected(front_ends) as raw:
            raw.writer.write(post(stream=True) + 64 * b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda: worker.running)
            (connection,) = front_ends.router._http._server._connections
            await until(lambda: len(connection.pipeline) == 64)
            raw.writer.write(5000 * b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await raw.reader.read()  # to the end
        assert len(connection.pipeline) == 65
        await until(lambda: worker.cancelled)
        await until(lambda: front_ends.router.num_requests == 0)


async def test_a_client_that_sent_two_requests_and_left_has_neither_run(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, gate=asyncio.Event())
    async with make_front_ends(fleet) as front_ends:
        async with connected(front_ends) as raw:
            raw.writer.write(post(stream=True) + post())
            await until(lambda: worker.running)
        await until(lambda: worker.cancelled)
        await until(lambda: front_ends.router.num_requests == 0)
        assert len(worker.submitted) == 1


async def test_who_never_ends_a_body_that_was_answered_is_hung_up_on(
    front_ends: FrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.openai.server.HEAD_S", 0.3)
    async with connected(front_ends) as raw:
        raw.writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert (await raw.answer())[0] == 404
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            while True:
                raw.writer.write(b"x")
                await raw.writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await raw.reader.readexactly(1)


async def test_connections_have_a_bound(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    await fleet.add(Role.DECODE)
    async with (
        make_front_ends(fleet, max_connections=2) as front_ends,
        contextlib.AsyncExitStack() as open_,
    ):
        for _ in range(2):
            raw = await open_.enter_async_context(connected(front_ends))
            raw.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await raw.answer())[0] == 200
        async with connected(front_ends) as third:
            head = (await third.reader.readuntil(b"\r\n\r\n")).decode()
            assert head.startswith("HTTP/1.1 503 ")
            assert {"retry-after: 1", "connection: close"} <= set(head.split("\r\n"))
            assert json.loads(await third.reader.read())["error"]["code"] == "unavailable"
        async with httpx.AsyncClient(base_url=front_ends.url) as client:
            refused = await client.post("/v1/completions", json={"prompt": "hello"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        refusals = front_ends.router.metrics.value(metrics.REFUSALS, reason="connections")
        assert refusals == 2
        raw.writer.write(post())
        assert (await raw.answer())[0] == 200
        raw.writer.close()
        await until(lambda: len(front_ends.router._http._server._connections) == 1)
        async with connected(front_ends) as fourth:
            fourth.writer.write(post())
            assert (await fourth.answer())[0] == 200


async def test_clients_that_send_nothing_make_room(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.openai.server._SLOW_S", 0.0)
    await fleet.add(Role.DECODE)
    async with (
        make_front_ends(fleet, max_connections=2) as front_ends,
        connected(front_ends) as used,
        connected(front_ends) as silent,
    ):
        used.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await used.answer())[0] == 200
        async with connected(front_ends) as third:
            third.writer.write(post())
            assert (await third.answer())[0] == 200
        with contextlib.suppress(ConnectionResetError):
            assert await silent.reader.read() == b""
        used.writer.write(post())
        assert (await used.answer())[0] == 200


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


_GENERATE = b"".join(
    header(name, value)
    for name, value in (
        *((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x")),
        *((b":path", b"/baton.v1.Inference/Generate"), (b"te", b"trailers")),
        (b"content-type", b"application/grpc"),
    )
)
_SETTINGS, _HEADERS, _DATA = 4, 1, 0


@contextlib.asynccontextmanager
async def deaf(front_ends: FrontEnds) -> AsyncIterator[Raw]:
    """A gRPC connection whose client has room for nothing."""
    reader, writer = await asyncio.open_connection(*front_ends.router.addresses.grpc.split(":"))
    no_window = (4).to_bytes(2, "big") + bytes(4)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0, no_window))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


async def test_a_call_that_is_never_sent_or_never_read_ends_with_its_connection(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.grpc.server._MIN_AGE_S", 1.0)
    worker = await fleet.add(Role.DECODE)
    message = pb.GenerateRequest(prompt="hello there you", max_tokens=3).SerializeToString()
    async with make_front_ends(fleet, max_timeout_s=3.0, default_timeout_s=3.0) as front_ends:
        before = len(asyncio.all_tasks())
        async with deaf(front_ends) as raw:
            raw.writer.write(frame(_HEADERS, 4, 1, _GENERATE) + frame(_HEADERS, 4, 3, _GENERATE))
            raw.writer.write(frame(_DATA, 1, 1, b"\0" + len(message).to_bytes(4, "big") + message))
            await until(lambda: worker.submitted)
            assert len(asyncio.all_tasks()) > before
            async with asyncio.timeout(60):
                await raw.reader.read()  # to the end: hung up on
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_grpc_connections_have_a_bound(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, max_connections=1) as front_ends:
        assert await front_ends.inference.ListModels(pb.ListModelsRequest())
        async with deaf(front_ends) as raw, asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                assert await raw.reader.read() == b""
        assert await front_ends.inference.ListModels(pb.ListModelsRequest())


@pytest.mark.parametrize("stops", [False, True])
async def test_a_task_that_is_stopped_as_its_client_leaves_is_stopped(stops: bool) -> None:
    """Else the server would wait for what it believes to be cancelled."""

    async def receive() -> dict[str, str]:
        if stops:
            task.cancel()
        return {"type": "http.disconnect"}

    async def serve() -> None:
        async with cancelled_when_gone(receive):  # type: ignore[arg-type]
            await asyncio.sleep(60)

    task = asyncio.create_task(serve())
    with pytest.raises(asyncio.CancelledError if stops else Cancelled):
        await task
    assert task.cancelled() == stops
