import asyncio
import contextlib
import gc
import struct
from contextlib import asynccontextmanager

import pytest

from protocol import codec
from protocol.errors import (
    DeadlineExceeded,
    ErrorCode,
    Internal,
    StaleMessage,
    Unauthenticated,
    Unavailable,
)
from protocol.ids import RequestKey, Role
from protocol.messages import (
    Ack,
    EventBatch,
    FailEvent,
    HandoffEnd,
    Subscribe,
    TokenEvent,
    WorkerLoad,
)
from rpc.client import ControlClient, _ServerConnection
from rpc.methods import END, EVENTS, STREAM_ITEMS, FrameKind, pack_call
from rpc.server import ControlServer

SECRET = b"secret"
TOKENS = tuple(TokenEvent(key=RequestKey("r"), index=i, token=i) for i in range(1000))


def message(number=1, text="r"):
    return HandoffEnd(
        key=RequestKey(text, 1), epoch=number, to_sender=True, released=True, error=None
    )


@asynccontextmanager
async def serving(handler, *, secret=SECRET):
    server = ControlServer({END: handler}, secret=SECRET)
    address = await server.start()
    client = ControlClient(address, secret=secret)
    try:
        yield client, server
    finally:
        await client.close()
        await server.stop(0)


@asynccontextmanager
async def streaming(events):
    server = ControlServer({EVENTS: events}, secret=SECRET)
    client = ControlClient(await server.start(), secret=SECRET)
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0)


async def test_calls_cross_each_other_and_arrive_whole():
    seen = []

    async def handler(request):
        seen.append(request)
        await asyncio.sleep(0.002 * (request.epoch % 5))
        if request.epoch % 7 == 0:
            raise StaleMessage(str(request.epoch), param="epoch")
        return Ack()

    async with serving(handler) as (client, _):
        sent = [message(i, "x" * (i * 997)) for i in range(1, 120)]
        calls = (client.call(END, each, timeout_s=60) for each in sent)
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sorted(seen, key=lambda m: m.epoch) == sent
    for each, answer in zip(sent, answers, strict=True):
        if each.epoch % 7:
            assert answer == Ack()
        else:
            assert answer.code is ErrorCode.STALE_MESSAGE
            assert (answer.message, answer.param) == (str(each.epoch), "epoch")


async def test_a_defect_of_the_handler_is_an_internal_error():
    async def handler(_request):
        raise ZeroDivisionError

    async with serving(handler) as (client, _):
        with pytest.raises(Internal, match="ZeroDivisionError"):
            await client.call(END, message(), timeout_s=60)


async def test_a_caller_that_gives_up_cancels_the_handler_and_may_call_again():
    cancelled = asyncio.Event()

    async def handler(request):
        if request.epoch == 1:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return Ack()

    async with serving(handler) as (client, _):
        assert await client.call(END, message(2), timeout_s=60) == Ack()  # takes time to connect
        async with asyncio.timeout(60):
            while not cancelled.is_set():  # it may not even have begun in time
                with pytest.raises(DeadlineExceeded):
                    await client.call(END, message(1), timeout_s=0.2)
                await client.call(END, message(2), timeout_s=60)  # after the cancel
        assert await client.call(END, message(2), timeout_s=60) == Ack()


async def test_a_server_that_goes_away_fails_calls_at_once():
    entered = asyncio.Event()

    async def handler(_request):
        entered.set()
        await asyncio.Event().wait()

    async with serving(handler) as (client, server):
        call = asyncio.create_task(client.call(END, message(), timeout_s=1000))
        await asyncio.wait_for(entered.wait(), 60)
        await server.stop(0)
        with pytest.raises(Unavailable):
            await call
        with pytest.raises(Unavailable):
            await client.call(END, message(), timeout_s=1000)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 13, b"\xff" * 64])
async def test_strangers_are_hung_up_on(garbage):
    async def handler(_request):
        return Ack()

    async with serving(handler) as (client, server):
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        writer.write(garbage)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        assert await client.call(END, message(), timeout_s=60) == Ack()


class Wire:
    """A network between a client and a server that keeps what passes and may change it."""

    def __init__(self, address):
        self._address = address
        self._server = None
        self.passed = {"up": b"", "down": b""}
        self.change = lambda way, data: data

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.address = ":".join(map(str, self._server.sockets[0].getsockname()))
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _meet(self, reader, writer):
        far_reader, far_writer = await asyncio.open_connection(*self._address.split(":"))
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(
                self._pass("up", reader, far_writer), self._pass("down", far_reader, writer)
            )

    async def _pass(self, way, reader, writer):
        try:
            while data := await reader.read(65536):
                self.passed[way] += data
                writer.write(self.change(way, data))
        finally:
            writer.close()


async def acknowledge(_request):
    return Ack()


async def test_the_secret_stays_where_it_is():
    async with serving(acknowledge) as (_, server), Wire(server.address) as wire:
        client = ControlClient(wire.address, secret=SECRET)
        assert await client.call(END, message(), timeout_s=60) == Ack()
        await client.close()
        assert all(len(passed) > 50 for passed in wire.passed.values())
        assert all(SECRET not in passed for passed in wire.passed.values())


@pytest.mark.parametrize("way", ["up", "down"])
async def test_what_was_changed_on_the_way_breaks_the_connection(way):
    seen = []

    async def handler(request):
        seen.append(request)
        return Ack()

    async with serving(handler) as (_, server), Wire(server.address) as wire:
        client = ControlClient(wire.address, secret=SECRET)
        assert await client.call(END, message(1), timeout_s=60) == Ack()
        wire.change = lambda at, data: data[:-20] + b"\x07" + data[-19:] if at == way else data
        with pytest.raises(Unavailable, match="broke"):
            await client.call(END, message(2), timeout_s=60)
        assert seen == [message(1)] + ([] if way == "up" else [message(2)])
        await client.close()


async def test_what_was_heard_cannot_be_said_again():
    seen = []

    async def handler(request):
        seen.append(request)
        return Ack()

    async with serving(handler) as (_, server), Wire(server.address) as wire:
        client = ControlClient(wire.address, secret=SECRET)
        await client.call(END, message(1), timeout_s=60)
        heard = wire.passed["up"]
        again = heard[heard.index(END.path.encode()) - 15 :]
        wire.change = lambda way, data: data + again if way == "up" else data
        with pytest.raises(Unavailable, match="broke"):
            await asyncio.gather(*(client.call(END, message(n), timeout_s=60) for n in (2, 3)))
        await client.close()
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        writer.write(heard)  # all of it, over a new connection
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert seen.count(message(1)) == 1


async def test_a_false_server_is_told_nothing():
    told = b""

    async def listen(reader, writer):
        nonlocal told
        told += await reader.read(65536)
        writer.write(struct.pack("!IBQ", 64, 0, 0) + b"n" * 32 + b"p" * 32)
        told += await reader.read(65536)
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        address = ":".join(map(str, server.sockets[0].getsockname()))
        client = ControlClient(address, secret=SECRET)
        with pytest.raises(Unauthenticated, match="does not know the secret"):
            await client.call(END, message(), timeout_s=60)
        await client.close()
    assert len(told) == 13 + 32  # a random number


async def test_a_stranger_who_is_silent_or_long_is_hung_up_on(monkeypatch):
    monkeypatch.setattr("rpc.server._HANDSHAKE_S", 0.1)
    async with serving(acknowledge) as (_, server):
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        assert not server.connections


async def test_a_peer_that_closes_an_idle_connection_is_no_error():
    """The caller gave up just before the connection was established."""
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: errors.append(what))
    link = _ServerConnection("peer", SECRET)
    link.connection_lost(ConnectionResetError())
    del link
    gc.collect()
    assert errors == []


async def test_a_reader_that_is_slow_holds_the_stream_up_and_loses_nothing():
    made = 0
    large = FailEvent(key=RequestKey("r"), error=Internal("x" * 200_000).info(), retriable=True)

    async def events(_request):
        nonlocal made
        for made in range(100):
            yield EventBatch(epoch=made, role=Role.DECODE, load=WorkerLoad(), failures=(large,))

    async with streaming(events) as client:
        stream = client.stream(EVENTS, Subscribe(router_id="r"))
        first = await anext(stream)
        client._connection._transport.pause_reading()
        await asyncio.sleep(0.2)
        held = made
        assert held < 99
        client._connection._transport.resume_reading()
        rest = [item.epoch async for item in stream]
    assert [first.epoch, *rest] == list(range(100))


async def test_a_reader_that_takes_nothing_is_not_sent_what_its_system_would_take():
    """Small items would fill buffers for minutes."""
    made = 0

    async def events(_request):
        nonlocal made
        for made in range(1, 301):
            yield EventBatch(epoch=made, role=Role.DECODE, load=WorkerLoad())

    async with streaming(events) as client:
        stream = client.stream(EVENTS, Subscribe(router_id="r"))
        first = await anext(stream)
        while made < STREAM_ITEMS + 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert made == STREAM_ITEMS + 1
        rest = [item.epoch async for item in stream]
    assert [first.epoch, *rest] == list(range(1, 301))


async def test_a_broken_connection_ends_streams_after_what_came_and_stops_their_makers():
    stopped = asyncio.Event()

    async def events(_request):
        try:
            yield EventBatch(epoch=1, role=Role.DECODE, load=WorkerLoad())
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with streaming(events) as client:
        stream = client.stream(EVENTS, Subscribe(router_id="r"))
        assert (await anext(stream)).epoch == 1
        client._connection._transport.abort()
        with pytest.raises(Unavailable, match="connection broke"):
            await asyncio.wait_for(anext(stream), 60)
        await asyncio.wait_for(stopped.wait(), 60)
        again = client.stream(EVENTS, Subscribe(router_id="r"))  # over a new connection
        assert (await asyncio.wait_for(anext(again), 60)).epoch == 1
        await again.aclose()


@pytest.mark.parametrize("kind", [FrameKind.CALL, FrameKind.STREAM])
async def test_a_number_that_is_used_twice_at_once_breaks_the_connection(kind):
    """The second would hide the first, which a lost connection could not cancel any more."""
    begun, ended = [], []

    async def events(_subscribe):
        begun.append("stream")
        try:
            while True:
                await asyncio.sleep(0.01)
                yield EventBatch(epoch=1, role=Role.DECODE, load=WorkerLoad())
        finally:
            ended.append("stream")

    async def wait(_end):
        begun.append("call")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("call")

    server = ControlServer({EVENTS: events, END: wait}, secret=SECRET)
    connection = await _ServerConnection.connect(await server.start(), secret=SECRET)
    frames = {
        FrameKind.STREAM: pack_call(EVENTS.path, codec.encode(Subscribe(router_id="r"))),
        FrameKind.CALL: pack_call(END.path, codec.encode(message())),
    }
    for other in frames:
        connection.send(other, 7 + other, frames[other])
    while len(begun) < 2:
        await asyncio.sleep(0.01)
    for number in {7 + other for other in frames}:
        connection.send(kind, number, frames[kind])
    async with asyncio.timeout(60):
        while not (connection.lost and len(ended) == 2):
            await asyncio.sleep(0.01)
    assert not server.connections
    assert sorted(begun) == ["call", "stream"]
    await server.stop(0)


async def test_a_server_that_stops_sends_what_it_has():
    ready = asyncio.Event()

    async def events(_request):
        for number in range(50):
            yield EventBatch(epoch=number, role=Role.DECODE, load=WorkerLoad(), tokens=TOKENS)
        ready.set()

    server = ControlServer({EVENTS: events}, secret=SECRET)
    client = ControlClient(await server.start(), secret=SECRET)
    stream = client.stream(EVENTS, Subscribe(router_id="r"))
    await anext(stream)
    await asyncio.wait_for(ready.wait(), 60)
    await server.stop(0)
    assert [item.epoch async for item in stream] == list(range(1, 50))
    await client.close()
