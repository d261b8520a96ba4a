import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from protocol.errors import (
    DeadlineExceeded,
    ErrorCode,
    Internal,
    StaleMessage,
    Unauthenticated,
    Unavailable,
)
from protocol.ids import RequestKey
from protocol.messages import (
    Ack,
    EventBatch,
    HandoffEnd,
    Subscribe,
    TokenEvent,
    WorkerLoad,
)
from rpc.methods import END, EVENTS
from rpc.quick import QuickClient
from rpc.service import ControlClient, ControlServer

SECRET = b"secret"
TOKENS = tuple(TokenEvent(key=RequestKey("r"), index=i, token=i) for i in range(1000))


def message(number=1, text="r"):
    return HandoffEnd(key=RequestKey(text, 1), epoch=number, released=True, error=None)


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
        calls = (client.call(END, each, timeout_s=5) for each in sent)
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
            await client.call(END, message(), timeout_s=5)


async def test_a_caller_that_gives_up_cancels_the_handler_and_may_call_again():
    cancelled = asyncio.Event()

    async def handler(request):
        if request.epoch == 1:
            try:
                await asyncio.sleep(30)
            finally:
                cancelled.set()
        return Ack()

    async with serving(handler) as (client, _):
        with pytest.raises(DeadlineExceeded):
            await client.call(END, message(1), timeout_s=0.2)
        await asyncio.wait_for(cancelled.wait(), 5)
        assert await client.call(END, message(2), timeout_s=5) == Ack()


async def test_a_server_that_goes_away_fails_calls_at_once():
    entered = asyncio.Event()

    async def handler(_request):
        entered.set()
        await asyncio.sleep(30)

    async with serving(handler) as (client, server):
        call = asyncio.create_task(client.call(END, message(), timeout_s=20))
        await asyncio.wait_for(entered.wait(), 5)
        start = time.monotonic()
        await server.stop(0)
        with pytest.raises(Unavailable):
            await call
        with pytest.raises(Unavailable):
            await client.call(END, message(), timeout_s=5)
        assert time.monotonic() - start < 10


async def test_the_secret_is_needed_on_both_ways():
    async def handler(_request):
        return Ack()

    async with serving(handler, secret=b"wrong") as (client, server):
        with pytest.raises(Unauthenticated):
            await client.call(END, message(), timeout_s=5)
        port = server._quick._server.sockets[0].getsockname()[1]
        quick = await QuickClient.connect("127.0.0.1", port, name="peer", secret=b"wrong")
        with pytest.raises(Unavailable):
            await quick.call(END.path, b"", 5)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 13, b"\xff" * 64])
async def test_strangers_are_hung_up_on(garbage):
    async def handler(_request):
        return Ack()

    async with serving(handler) as (client, server):
        port = server._quick._server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert await client.call(END, message(), timeout_s=5) == Ack()


async def test_a_reader_that_is_slow_holds_the_stream_up_and_loses_nothing():
    made = 0

    async def events(_request):
        nonlocal made
        for made in range(400):
            yield EventBatch(epoch=made, sequence=made, load=WorkerLoad(), tokens=TOKENS)

    async with streaming(events) as client:
        stream = client.stream(EVENTS, Subscribe(router_id="r"))
        first = await anext(stream)
        client._quick._transport.pause_reading()
        await asyncio.sleep(0.2)
        held = made
        assert held < 399
        client._quick._transport.resume_reading()
        rest = [item.epoch async for item in stream]
    assert [first.epoch, *rest] == list(range(400))


async def test_a_broken_connection_ends_streams_after_what_came_and_stops_their_makers():
    stopped = asyncio.Event()

    async def events(_request):
        try:
            yield EventBatch(epoch=1, sequence=1, load=WorkerLoad())
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with streaming(events) as client:
        stream = client.stream(EVENTS, Subscribe(router_id="r"))
        assert (await anext(stream)).epoch == 1
        client._quick._transport.abort()
        with pytest.raises(Unavailable, match="connection broke"):
            await asyncio.wait_for(anext(stream), 5)
        await asyncio.wait_for(stopped.wait(), 5)
        again = client.stream(EVENTS, Subscribe(router_id="r"))  # over a new connection
        assert (await asyncio.wait_for(anext(again), 5)).epoch == 1
        await again.aclose()


async def test_a_server_that_stops_sends_what_it_has():
    ready = asyncio.Event()

    async def events(_request):
        for number in range(50):
            yield EventBatch(epoch=number, sequence=number, load=WorkerLoad(), tokens=TOKENS)
        ready.set()

    server = ControlServer({EVENTS: events}, secret=SECRET)
    client = ControlClient(await server.start(), secret=SECRET)
    stream = client.stream(EVENTS, Subscribe(router_id="r"))
    await anext(stream)
    await asyncio.wait_for(ready.wait(), 5)
    await server.stop(0)
    assert [item.epoch async for item in stream] == list(range(1, 50))
    await client.close()
