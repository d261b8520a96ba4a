import asyncio
import gc
import resource
import socket
import time
import warnings
from contextlib import asynccontextmanager

import pytest

from protocol.errors import (
    BatonError,
    DeadlineExceeded,
    ErrorCode,
    ErrorInfo,
    Internal,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from protocol.ids import RequestKey, Role
from protocol.messages import Ack, Cancel, EventBatch, Subscribe, WorkerLoad
from rpc.client import ClientPool, ControlClient
from rpc.methods import EVENTS, SUBMIT, Method
from rpc.server import ControlServer

SECRET = b"secret"
CANCEL = Method("baton.test.v1.Test", "Cancel", Cancel, Ack)
KEYS = Cancel(keys=(RequestKey("r", 1),))


@asynccontextmanager
async def serving(handlers, *, server_secret=SECRET, client_secret=SECRET):
    server = ControlServer(handlers, secret=server_secret)
    address = await server.start()
    client = ControlClient(address, secret=client_secret)
    try:
        yield client, server
    finally:
        await client.close()
        await server.stop(0)


async def acknowledge(_request):
    return Ack()


async def test_a_request_arrives_whole_and_its_reply_comes_back():
    seen = []

    async def cancel(request):
        seen.append(request)
        return Ack()

    async with serving({CANCEL: cancel}) as (client, _):
        assert await client.call(CANCEL, KEYS, timeout_s=60) == Ack()
    assert seen == [KEYS]


async def test_two_servers_take_two_ports():
    async with (
        serving({CANCEL: acknowledge}) as (_, one),
        serving({CANCEL: acknowledge}) as (_, two),
    ):
        assert one.address != two.address
        assert not one.address.endswith(":0")


async def test_an_impossible_host_is_a_typed_error():
    with pytest.raises(Unavailable, match=r"203\.0\.113\.1"):
        await ControlServer({CANCEL: acknowledge}, secret=SECRET).start("203.0.113.1")


@pytest.mark.parametrize("code", ErrorCode)
async def test_every_error_crosses_the_wire_as_itself(code):
    info = ErrorInfo(
        code=code, message="caf\u00e9: what happened", param="top_p", retry_after_s=2.5
    )

    async def fail(_request):
        raise info.to_error()

    async with serving({CANCEL: fail}) as (client, _):
        with pytest.raises(BatonError) as caught:
            await client.call(CANCEL, KEYS, timeout_s=60)
    assert type(caught.value) is type(info.to_error())
    assert caught.value.info() == info


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.STALE_MESSAGE])
async def test_an_error_in_a_stream_comes_after_what_was_sent(code):
    async def events(_request):
        yield batch(0)
        yield batch(1)
        raise ErrorInfo(code=code, message="enough").to_error()

    received = []
    async with serving({EVENTS: events}) as (client, _):
        with pytest.raises(BatonError) as caught:
            async for item in client.stream(EVENTS, Subscribe(router_id="r")):
                received.append(item)
    assert received == [batch(0), batch(1)]
    assert caught.value.code is code


async def test_a_defect_is_internal_and_the_server_lives_on():
    calls = []

    async def broken(_request):
        calls.append(1)
        raise KeyError("oops")

    async with serving({CANCEL: broken}) as (client, _):
        for _ in range(2):
            with pytest.raises(Internal, match="Cancel: KeyError"):
                await client.call(CANCEL, KEYS, timeout_s=60)
    assert len(calls) == 2


async def test_a_handler_that_waits_for_nothing_answers_before_the_next_call_is_looked_at():
    calls = []

    def cancel(request):
        calls.append(len(request.keys))
        if len(request.keys) == 1:
            raise Overloaded("too many")
        return Ack() if request.keys else {}["oops"]

    async with serving({CANCEL: cancel}) as (client, server):
        await client._connected()
        (caller,) = server.connections
        replies = [
            client.call(CANCEL, Cancel(keys=KEYS.keys * count), timeout_s=60) for count in (2, 1, 0)
        ]
        ack, refused, broken = await asyncio.gather(*replies, return_exceptions=True)
        assert ack == Ack()
        assert (type(refused), str(refused)) == (Overloaded, "too many")
        assert (type(broken), str(broken)) == (Internal, "Cancel: KeyError: 'oops'")
        assert not caller.calls
    assert calls == [2, 1, 0]


def batch(sequence):
    return EventBatch(epoch=sequence, role=Role.DECODE, load=WorkerLoad(running=sequence))


async def test_a_stream_arrives_in_order_and_ends():
    async def events(request):
        assert request.router_id == "router-7"
        for sequence in range(100):
            yield batch(sequence)

    async with serving({EVENTS: events}) as (client, _):
        received = [b async for b in client.stream(EVENTS, Subscribe(router_id="router-7"))]
    assert received == [batch(n) for n in range(100)]


async def test_each_item_arrives_when_it_is_sent():
    more = asyncio.Event()

    async def events(_request):
        yield batch(0)
        await more.wait()
        yield batch(1)

    async with serving({EVENTS: events}) as (client, _):
        stream = client.stream(EVENTS, Subscribe(router_id="r"))
        assert (await asyncio.wait_for(anext(stream), 60)).epoch == 0
        more.set()
        assert (await asyncio.wait_for(anext(stream), 60)).epoch == 1
        await stream.aclose()


async def test_closing_the_stream_stops_the_server_side():
    stopped = asyncio.Event()

    async def events(_request):
        try:
            yield batch(0)
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with serving({EVENTS: events}) as (client, _):
        stream = client.stream(EVENTS, Subscribe(router_id="r"))
        await anext(stream)
        await stream.aclose()
        await asyncio.wait_for(stopped.wait(), 60)


async def test_cancelling_the_caller_cancels_the_handler():
    started, stopped = asyncio.Event(), asyncio.Event()

    async def slow(_request):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with serving({CANCEL: slow}) as (client, _):
        call = asyncio.create_task(client.call(CANCEL, KEYS, timeout_s=60))
        await asyncio.wait_for(started.wait(), 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(stopped.wait(), 60)


async def test_a_call_that_is_given_up_before_its_handler_begins_leaves_nothing_behind():
    begun = []

    async def cancel(_request):
        begun.append(1)
        return Ack()

    async with serving({CANCEL: cancel}) as (client, _):
        await client.call(CANCEL, KEYS, timeout_s=60)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call = asyncio.create_task(client.call(CANCEL, KEYS, timeout_s=60))
            await asyncio.sleep(0)
            call.cancel()  # both frames arrive together
            await asyncio.gather(call, return_exceptions=True)
            await client.call(CANCEL, KEYS, timeout_s=60)
            gc.collect()
    assert len(begun) == 2
    assert [str(each.message) for each in caught] == []


async def test_a_deadline_is_kept_and_typed():
    async def never(_request):
        await asyncio.Event().wait()

    async with serving({CANCEL: never}) as (client, server):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="Cancel at") as caught:
            await client.call(CANCEL, KEYS, timeout_s=0.2)
        assert time.monotonic() - began >= 0.15
        assert server.address in caught.value.message


async def test_a_deadline_counts_while_another_call_connects():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ControlClient(f"127.0.0.1:{silent.getsockname()[1]}", secret=SECRET)
        patient = asyncio.create_task(client.call(CANCEL, KEYS, timeout_s=60))
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            with pytest.raises(DeadlineExceeded, match="Cancel at 127"):
                await client.call(CANCEL, KEYS, timeout_s=0.05)
        assert not patient.done()
        patient.cancel()
        await asyncio.gather(patient, return_exceptions=True)


@pytest.mark.parametrize("secret", [b"", b"Secret", b"secret\0", b"\xff\xfe"])
async def test_a_wrong_secret_reaches_no_handler(secret):
    calls = []

    async def cancel(_request):
        calls.append(1)
        return Ack()

    async with serving({CANCEL: cancel}, client_secret=secret) as (client, _):
        with pytest.raises(Unauthenticated):
            await client.call(CANCEL, KEYS, timeout_s=60)
    assert calls == []


async def test_a_wrong_secret_opens_no_stream():
    async def events(_request):
        yield batch(0)

    async with serving({EVENTS: events}, client_secret=b"wrong") as (client, _):
        with pytest.raises(Unauthenticated):
            await anext(client.stream(EVENTS, Subscribe(router_id="r")))


async def test_bytes_that_are_no_message_name_the_field():
    async with serving({CANCEL: acknowledge}) as (client, _):
        link = await client._connected()
        with pytest.raises(InvalidRequest, match=r"Cancel\.keys"):
            await link.call(CANCEL.path, b"\x92\xc2\x01", asyncio.get_running_loop().time() + 60)


async def test_a_reply_of_the_wrong_class_is_refused():
    async def confused(_request):
        return KEYS

    async with serving({CANCEL: confused}) as (client, _):
        with pytest.raises(InvalidRequest, match="Ack"):
            await client.call(CANCEL, KEYS, timeout_s=60)


async def test_an_unknown_method_is_unavailable_not_a_hang():
    other = Method(CANCEL.service, "Other", Cancel, Ack)
    async with serving({CANCEL: acknowledge, SUBMIT: acknowledge}) as (client, _):
        with pytest.raises(Unavailable, match="no method"):
            await client.call(other, KEYS, timeout_s=60)
        with pytest.raises(Unavailable, match="no stream"):
            await anext(client.stream(EVENTS, Subscribe(router_id="r")))


async def test_an_absent_peer_is_unavailable_at_once():
    async with serving({CANCEL: acknowledge}) as (_, server):
        address = server.address
    client = ControlClient(address, secret=SECRET)
    with pytest.raises(Unavailable) as caught:
        await client.call(CANCEL, KEYS, timeout_s=1000)
    assert caught.value.param == "address"
    await client.close()


async def test_a_caller_without_files_does_not_take_the_peer_for_absent():
    async with serving({CANCEL: acknowledge}) as (client, _):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(Unavailable) as caught:
                await client.call(CANCEL, KEYS, timeout_s=60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caught.value.param is None
        assert await client.call(CANCEL, KEYS, timeout_s=60) == Ack()


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "127.0.0.1:port", "missing"])
async def test_an_invalid_address_refuses_connections(address):
    client = ControlClient(address, secret=SECRET)
    with pytest.raises(Unavailable) as caught:
        await client.call(CANCEL, KEYS, timeout_s=60)
    assert caught.value.param == "address"


async def test_a_server_that_stops_ends_its_streams():
    async def events(_request):
        yield batch(0)
        await asyncio.Event().wait()

    async with serving({EVENTS: events}) as (client, server):
        stream = client.stream(EVENTS, Subscribe(router_id="r"))
        await anext(stream)
        await server.stop(0)
        with pytest.raises((Unavailable, Overloaded)):
            await asyncio.wait_for(anext(stream), 60)


async def test_many_calls_at_once_keep_to_their_own_replies():
    async def cancel(request):
        await asyncio.sleep(0.001 * (int(request.keys[0].request_id) % 5))
        if int(request.keys[0].request_id) % 7 == 0:
            raise Overloaded(request.keys[0].request_id)
        return Ack()

    async def one(client, number):
        try:
            await client.call(CANCEL, Cancel(keys=(RequestKey(str(number)),)), timeout_s=60)
        except Overloaded as error:
            return error.message
        return None

    async with serving({CANCEL: cancel}) as (client, _):
        results = await asyncio.gather(*(one(client, number) for number in range(200)))
    assert results == [str(n) if n % 7 == 0 else None for n in range(200)]


async def test_a_message_of_megabytes_passes():
    seen = []

    async def cancel(request):
        seen.append(len(request.keys))
        return Ack()

    many = Cancel(keys=tuple(RequestKey("r" * 100, n) for n in range(50_000)))
    async with serving({CANCEL: cancel}) as (client, _):
        await client.call(CANCEL, many, timeout_s=60)
    assert seen == [50_000]


async def test_the_pool_has_one_client_an_address_and_none_of_peers_that_left():
    async with serving({CANCEL: acknowledge}) as (_, server):
        pool = ClientPool(secret=SECRET)
        first = pool.get(server.address)
        assert pool.get(server.address) is first
        assert await first.call(CANCEL, KEYS, timeout_s=60) == Ack()
        for _ in range(3):
            async with serving({CANCEL: acknowledge}) as (_, leaving):
                assert await pool.get(leaving.address).call(CANCEL, KEYS, timeout_s=60) == Ack()
                assert pool.get(server.address) is first
            with pytest.raises(Unavailable):
                await pool.get(leaving.address).call(CANCEL, KEYS, timeout_s=60)
        last = pool.get("127.0.0.1:1")
        assert pool._clients == {server.address: first, "127.0.0.1:1": last}
        assert await first.call(CANCEL, KEYS, timeout_s=60) == Ack()
        await pool.close()


async def test_a_connection_that_comes_about_after_the_close_is_closed():
    async with serving({CANCEL: lambda _request: acknowledge(_request)}) as (client, server):
        call = asyncio.create_task(client.call(CANCEL, KEYS, timeout_s=60))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Unavailable, match="was closed"):
            await call
        async with asyncio.timeout(60):
            while server.connections:
                await asyncio.sleep(0.01)


async def test_calls_and_streams_that_are_over_leave_nothing():
    held = asyncio.Event()

    async def cancel(request):
        if request.keys:
            await held.wait()
        return Ack()

    async def events(request):
        for sequence in range(3 if request.router_id == "short" else 10**6):
            yield EventBatch(epoch=sequence, role=Role.DECODE, load=WorkerLoad())

    async with serving({CANCEL: cancel, EVENTS: events}) as (client, server):
        assert await client.call(CANCEL, Cancel(keys=()), timeout_s=60) == Ack()
        with pytest.raises(DeadlineExceeded):
            await client.call(CANCEL, KEYS, timeout_s=0.05)
        calling = asyncio.create_task(client.call(CANCEL, KEYS, timeout_s=60))
        assert len([b async for b in client.stream(EVENTS, Subscribe(router_id="short"))]) == 3
        stream = client.stream(EVENTS, Subscribe(router_id="long"))
        assert (await anext(stream)).epoch == 0
        near = client._connection
        (far,) = server.connections
        assert (len(near._replies), len(near._streams), len(far._running)) == (1, 1, 2)
        calling.cancel()
        await stream.aclose()
        async with asyncio.timeout(60):
            while far._running:
                await asyncio.sleep(0.005)
        assert near._replies == near._streams == far._credits == {}
        assert not far.calls


async def test_a_peer_that_hangs_up_before_it_has_proved_the_secret_is_absent_at_once():
    peers = []

    async def hang_up(_reader, writer):
        peers.append(writer)
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    client = ControlClient(f"{host}:{port}", secret=SECRET)
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable) as caught:
            await client.call(CANCEL, KEYS, timeout_s=600)
        with pytest.raises(Unavailable):
            await anext(client.stream(EVENTS, Subscribe(router_id="r")))
    assert (caught.value.param, len(peers)) == ("address", 2)
    listener.close()


async def test_what_has_ended_takes_no_more():
    async with serving({CANCEL: acknowledge}) as (client, server):
        assert await client.call(CANCEL, KEYS, timeout_s=60) == Ack()
        connection = client._connection
        await server.stop(0)
        async with asyncio.timeout(60):
            while not connection.lost:
                await asyncio.sleep(0.005)
            with pytest.raises(Unavailable, match="not connected"):
                await connection.call(CANCEL.path, b"", asyncio.get_running_loop().time() + 600)
            with pytest.raises(Unavailable, match="not connected"):
                await anext(connection.stream(EVENTS.path, b""))
        host, port = server.address.rsplit(":", 1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
