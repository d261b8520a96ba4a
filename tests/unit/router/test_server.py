"""Starting, draining, stopping, sharing ports; the admin service."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import resource
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc import aio

from baton_client import BatonClient, CallError, Retry
from observability import metrics
from protocol.errors import NotFound, Unavailable
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.admin import ClusterInfo, PoolSize
from router.auth.keys import hashed, new_key
from router.config import RouterConfig
from router.server import Router, fit_connections
from tests.support import services
from tests.support.ports import free_port
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, status_of, until
from tests.support.stub_workers import StubFleet


async def test_a_router_that_ends_refuses_the_new(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        front_ends.router._service.limits.close()
        assert not front_ends.router.ready
        assert front_ends.router.view().routers[0].state == "draining"
        status, answer = await front_ends.post("/v1/completions", {"prompt": "hello"})
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in front_ends.inference.Generate(pb.GenerateRequest(prompt="hello")):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_stop_is_idempotent_and_leaves_no_task(fleet: StubFleet, model_folder: Path) -> None:
    await fleet.add(Role.DECODE)
    before = asyncio.all_tasks()
    router = Router(RouterConfig(model_path=str(model_folder)), secret=fleet.secret)
    await router.start(http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0)
    router.set_workers(fleet.refs)
    await until(lambda: router.ready)
    await router.stop()
    await router.stop()
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    names = {task.get_coro().__qualname__ for task in left}
    assert names <= {"AioServer._serving_loop", "ServerConnection._stream"}  # of the fleet


async def test_two_routers_share_a_port(fleet: StubFleet, model_folder: Path) -> None:
    await fleet.add(Role.DECODE)
    config = RouterConfig(model_path=str(model_folder))
    routers = [Router(config, secret=fleet.secret) for _ in range(2)]
    where = {"http_host": "127.0.0.1", "grpc_host": "127.0.0.1"}
    try:
        first = await routers[0].start(**where, http_port=free_port(), grpc_port=free_port())
        ports = [int(address.split(":")[1]) for address in (first.http, first.grpc)]
        second = await routers[1].start(**where, http_port=ports[0], grpc_port=ports[1])
        assert (first.http, first.grpc) == (second.http, second.grpc)
    finally:
        for router in routers:
            await router.stop()


async def test_routers_of_one_port_are_scraped_apart(fleet: StubFleet, model_folder: Path) -> None:
    await fleet.add(Role.DECODE)
    config = RouterConfig(model_path=str(model_folder))
    routers = [Router(config, secret=fleet.secret) for _ in range(2)]
    where = {"http_host": "127.0.0.1", "grpc_host": "127.0.0.1", "http_port": free_port()}
    grpc_port = free_port()
    try:
        for router in routers:
            await router.start(**where, grpc_port=grpc_port)
        addresses = [router.addresses.metrics for router in routers]
        assert len(set(addresses)) == 2
        for router in routers:
            router.set_routers(addresses, {})
        routers[0].metrics.count(metrics.REQUESTS, door="http", endpoint="x")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{routers[0].addresses.http}/metrics/targets") as found:
                assert await found.json() == [{"targets": addresses, "labels": {}}]
            texts = []
            for address in addresses:
                async with session.get(f"http://{address}/metrics") as answer:
                    texts.append(await answer.text())
                async with session.get(f"http://{address}/v1/models") as answer:
                    assert answer.status == 404
        assert ['endpoint="x"' in text for text in texts] == [True, False]
    finally:
        for router in routers:
            await router.stop()


async def test_a_retiring_router_leaves_its_clients_to_the_other(
    fleet: StubFleet, model_folder: Path
) -> None:
    """On a shared port: what runs ends well, and not one new call is refused."""
    worker = await fleet.add(Role.DECODE, gate=asyncio.Event())
    config = RouterConfig(model_path=str(model_folder))
    routers = [Router(config, secret=fleet.secret) for _ in range(2)]
    where = {"http_host": "127.0.0.1", "grpc_host": "127.0.0.1", "http_port": free_port()}
    grpc_port = free_port()
    for router in routers:
        await router.start(**where, grpc_port=grpc_port)
        router.set_workers(fleet.refs)
    await until(lambda: all(router.ready for router in routers))
    # Channels of their own, so that the kernel spreads them over both routers.
    own = (("grpc.use_local_subchannel_pool", 1),)
    channels = [aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=own) for _ in range(16)]
    stubs = [services.InferenceStub(channel) for channel in channels]

    async def ask(stub: services.InferenceStub) -> int:
        request = pb.GenerateRequest(prompt="hello", max_tokens=20, ignore_eos=True)
        return sum([len(c.token_ids) async for m in stub.Generate(request) for c in m.choices])

    try:
        running = [asyncio.create_task(ask(stub)) for stub in stubs]
        await until(lambda: sum(router.num_requests for router in routers) == 16)
        assert routers[0].num_requests, "the kernel gave every connection to one router"
        ready = grpc.ChannelConnectivity.READY
        num_leaving = routers[0].num_requests
        retiring = asyncio.create_task(routers[0].retire(60.0))
        await until(  # they were told; a call that is sent before that may be cut off by gRPC
            lambda: sum(channel.get_state() is not ready for channel in channels) == num_leaving
        )
        assert routers[0].view().routers[0].state == "draining"
        worker.gate.set()
        assert await asyncio.gather(*map(ask, stubs)) == [20] * 16
        assert await asyncio.gather(*running) == [20] * 16
        assert await retiring
    finally:
        for channel in channels:
            await channel.close()
        for router in routers:
            await router.stop()


async def test_what_comes_while_a_router_stops_is_served_by_the_next(model_folder: Path) -> None:
    """Clients that go on while one router after another takes over, each with a loop that was held
    up, so that calls wait unread as it stops: none fails."""
    config = RouterConfig(model_path=str(model_folder))
    where = {"http_host": "127.0.0.1", "grpc_host": "127.0.0.1", "http_port": free_port()}
    where |= {"grpc_port": free_port()}
    old = Router(config, secret=b"x")
    addresses = await old.start(**where)
    over, errors = threading.Event(), []
    asked = {"grpc": 0, "http": 0, "http, a connection each": 0}

    def over_grpc() -> None:
        with BatonClient(addresses.grpc, retry=Retry(attempts=1), timeout_s=60) as client:
            while not over.wait(0.005):
                asked["grpc"] += len(client.models())

    async def over_http(name: str, connector: aiohttp.TCPConnector) -> None:
        url = f"http://{addresses.http}/tokenize"
        async with aiohttp.ClientSession(connector=connector) as session:
            while not over.is_set():
                async with session.post(url, json={"prompt": "a"}) as answer:
                    asked[name] += (await answer.json())["count"]
                await asyncio.sleep(0.005)

    async def kept() -> None:
        await over_http("http", aiohttp.TCPConnector())

    async def anew() -> None:
        await over_http("http, a connection each", aiohttp.TCPConnector(force_close=True))

    def ask(run: Callable[[], None]) -> None:
        try:
            run()
        except (CallError, aiohttp.ClientError) as error:
            errors.append(repr(error))

    runs = [over_grpc, lambda: asyncio.run(kept()), lambda: asyncio.run(anew())] * 3
    threads = [threading.Thread(target=ask, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            goal = min(asked.values()) + 20
            await until(lambda goal=goal: errors or min(asked.values()) > goal)
            new = Router(config, secret=b"x")
            await new.start(**where)
            asyncio.get_running_loop().call_soon(time.sleep, 0.05)
            await asyncio.sleep(0)
            assert await old.retire(60.0)
            await old.stop()
            old = new
    finally:
        over.set()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        await old.stop()
    assert errors == []


@pytest.mark.parametrize("way", ["stop", "retire"])
async def test_what_a_stopping_router_cuts_off_ends_in_a_typed_error(
    fleet: StubFleet, model_folder: Path, way: str
) -> None:
    worker = await fleet.add(Role.DECODE, delay_s=0.02)
    router = Router(RouterConfig(model_path=str(model_folder)), secret=fleet.secret)
    where = await router.start(
        http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0
    )
    router.set_workers(fleet.refs)
    await until(lambda: router.ready)
    num_tokens, lines = 0, []

    async def over_grpc(channel: aio.Channel) -> None:
        nonlocal num_tokens
        request = pb.GenerateRequest(prompt="hello", max_tokens=480, ignore_eos=True)
        async for message in services.InferenceStub(channel).Generate(request):
            num_tokens += sum(len(choice.token_ids) for choice in message.choices)

    async def over_http(session: aiohttp.ClientSession) -> None:
        body = {"prompt": "hello", "max_tokens": 480, "stream": True}
        async with session.post(f"http://{where.http}/v1/completions", json=body) as answer:
            async for line in answer.content:
                lines.append(line)

    async with aio.insecure_channel(where.grpc) as channel, aiohttp.ClientSession() as session:
        calls = [asyncio.create_task(call) for call in (over_grpc(channel), over_http(session))]
        await until(lambda: num_tokens and lines)
        if way == "retire":
            assert not await router.retire(0.1)
        await router.stop()
        with pytest.raises(aio.AioRpcError) as caught:
            await calls[0]
        await calls[1]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "this router stops, the request is not over"
    assert 0 < num_tokens < 480
    last = json.loads([line for line in lines if line.strip()][-1].removeprefix(b"data: "))
    assert last["error"]["message"] == "this router stops, the request is not over"
    await until(lambda: not worker.running)


async def test_a_request_that_was_still_being_sent_is_cut_off_no_worse(
    fleet: StubFleet, model_folder: Path
) -> None:
    """Nothing was in flight when the router began to retire: it came after that."""
    worker = await fleet.add(Role.DECODE, delay_s=0.02)
    router = Router(RouterConfig(model_path=str(model_folder)), secret=fleet.secret)
    where = await router.start(
        http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0
    )
    router.set_workers(fleet.refs)
    await until(lambda: router.ready)
    body = json.dumps({"prompt": "hello", "max_tokens": 480, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection(*where.http.split(":"))
    writer.write(f"{head}expect: 100-continue\r\n\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    retiring = asyncio.create_task(router.retire(1.0))
    await asyncio.sleep(0)
    writer.write(body)
    await until(lambda: router.num_requests == 1)
    answer = await reader.read()
    assert not await retiring
    writer.close()
    await router.stop()
    assert 0 < answer.count(b"data: {") < 480
    assert b"this router stops, the request is not over" in answer
    await until(lambda: not worker.running)


async def test_a_port_that_is_taken_is_named(model_folder: Path) -> None:
    config = RouterConfig(model_path=str(model_folder), reuse_port=False)
    first, second = (Router(config, secret=b"x") for _ in range(2))
    where = {"http_host": "127.0.0.1", "grpc_host": "127.0.0.1"}
    taken = await first.start(**where, http_port=0, grpc_port=0)
    try:
        for front_end, index in (("http", 0), ("grpc", 1)):
            port = int(dataclasses.astuple(taken)[index].split(":")[1])
            ports = {"http_port": 0, "grpc_port": 0} | {f"{front_end}_port": port}
            with pytest.raises(Unavailable) as caught:
                await second.start(**where, **ports)
            assert caught.value.param == f"{front_end}_port"
    finally:
        await first.stop()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_path", ""),
        ("max_requests", 0),
        ("silence_s", 0),
        ("local_prefill_tokens", -1),
        ("local_gain_s", -0.1),
        ("max_model_len", 1),
        ("default_timeout_s", 1e9),
    ],
)
def test_a_bad_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        RouterConfig(**({"model_path": "m"} | {field: value}))


# --- admin ----------------------------------------------------------------------------------------


class Backend:
    """An admin backend that remembers what it was asked."""

    def __init__(self) -> None:
        self.scaled: list[tuple[Mapping[Role, int], Collection[Role]]] = []

    async def view(self, own: ClusterInfo) -> ClusterInfo:
        pools = tuple(dataclasses.replace(pool, target=len(pool.workers)) for pool in own.pools)
        prefill, decode = pools
        decode = dataclasses.replace(decode, bounds=(1, 4), pinned=True, reason="full")
        return dataclasses.replace(own, pools=(prefill, decode))

    async def scale(self, sizes: Mapping[Role, int], automatic: Collection[Role] = ()) -> None:
        self.scaled.append((sizes, automatic))

    async def drain(self, worker_id: str) -> None:
        if worker_id != "decode-1":
            raise NotFound(f"no worker {worker_id}", param="worker_id")


async def test_the_cluster_can_be_seen(front_ends: FrontEnds) -> None:
    cluster = await front_ends.admin.GetCluster(pb.GetClusterRequest())
    assert cluster.model == "tiny"
    assert [pool.role for pool in cluster.pools] == ["prefill", "decode"]
    (worker,) = cluster.pools[1].workers
    assert (worker.worker_id, worker.state, worker.total_blocks) == ("decode-1", "ready", 64)
    assert not cluster.pools[0].HasField("target")
    (router,) = cluster.routers
    assert router.state == "ready"
    assert router.http_address == front_ends.router.addresses.http
    with pytest.raises(aio.AioRpcError) as caught:
        await front_ends.admin.Scale(pb.ScaleRequest(decode=2))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_lost_worker_is_not_exported_as_ready(front_ends: FrontEnds) -> None:
    ready = 'baton_workers{model_name="tiny",role="decode",state="ready"} 1.0'
    assert ready in (await front_ends.router.metrics_text()).decode()
    (decode,) = (worker for worker in front_ends.fleet.workers if worker.role is Role.DECODE)
    await decode.stop()
    while front_ends.router.ready:
        await front_ends.router._workers.changed(5)
    text = (await front_ends.router.metrics_text()).decode()
    assert 'role="decode",state=' not in text
    assert 'baton_workers{model_name="tiny",role="prefill",state="ready"} 1.0' in text


async def test_the_cluster_can_be_steered(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    backend = Backend()
    async with make_front_ends(fleet, admin=backend) as front_ends:
        cluster = await front_ends.admin.Scale(pb.ScaleRequest(decode=2))
        assert [pool.target for pool in cluster.pools] == [1, 1]
        prefill, decode = cluster.pools
        assert (decode.min_replicas, decode.max_replicas, decode.pinned) == (1, 4, True)
        assert decode.reason == "full"
        assert not prefill.HasField("max_replicas")
        sizes = [PoolSize(role=Role.DECODE, wanted=2, pinned=True)]
        front_ends.router.set_sizes(sizes)
        wanted = front_ends.router.metrics.value(metrics.POOL_WANTED, pool="decode")
        pinned = front_ends.router.metrics.value(metrics.POOL_PINNED, pool="decode")
        assert (wanted, pinned) == (2.0, 1.0)
        await front_ends.admin.Scale(pb.ScaleRequest(prefill=0, decode=3))
        await front_ends.admin.Scale(pb.ScaleRequest(decode=1, automatic=["prefill"]))
        assert backend.scaled == [
            ({Role.DECODE: 2}, set()),
            ({Role.PREFILL: 0, Role.DECODE: 3}, set()),
            ({Role.DECODE: 1}, {Role.PREFILL}),
        ]
        await front_ends.admin.Drain(pb.DrainRequest(worker_id="decode-1"))
        bad = [
            (front_ends.admin.Scale, pb.ScaleRequest(), "prefill"),
            (front_ends.admin.Scale, pb.ScaleRequest(prefill=-1), "prefill"),
            (front_ends.admin.Scale, pb.ScaleRequest(decode=0), "decode"),
            (front_ends.admin.Scale, pb.ScaleRequest(decode=10**9), "decode"),
            (front_ends.admin.Scale, pb.ScaleRequest(automatic=["router"]), "automatic"),
            (front_ends.admin.Scale, pb.ScaleRequest(decode=1, automatic=["decode"]), "automatic"),
            (front_ends.admin.Drain, pb.DrainRequest(), "worker_id"),
            (front_ends.admin.Drain, pb.DrainRequest(worker_id="x"), "worker_id"),
        ]
        for method, request, param in bad:
            with pytest.raises(aio.AioRpcError) as caught:
                await method(request)
            assert status_of(caught.value)[1]["baton-error-param"] == param


async def test_admin_can_be_left_out(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    async with make_front_ends(fleet, admin_enabled=False) as front_ends:
        with pytest.raises(aio.AioRpcError) as caught:
            await front_ends.admin.GetCluster(pb.GetClusterRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("soft", "hard", "requested", "raised", "fitting"),
    [
        (1024, 1_000_000, 4096, 8704, 4096),
        (1024, 4096, 4096, 4096, 1792),
        (20_000, 20_000, 4096, 20_000, 4096),
        (1024, resource.RLIM_INFINITY, 100, 1024, 100),
        (256, 256, 4096, 256, 1),
    ],
)
def test_connections_fit_the_limit_of_open_files(
    soft: int, hard: int, requested: int, raised: int, fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert fit_connections(requested) == fitting
    assert limits[-1] == (raised, hard)


async def test_metrics_are_written_once_for_all_that_ask(
    front_ends: FrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[bool] = []

    def render() -> bytes:
        rendered.append(threading.current_thread() is threading.main_thread())
        return b"text"

    monkeypatch.setattr(front_ends.router.metrics, "render", render)
    texts = await asyncio.gather(*(front_ends.router.metrics_text() for _ in range(5)))
    assert texts == [b"text"] * 5
    assert rendered == [False]


async def test_metrics_may_need_a_key(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, tmp_path: Path
) -> None:
    await fleet.add(Role.DECODE)
    key, file = new_key(), tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [{"name": "scraper", "hash": hashed(key)}]}))
    async with (
        make_front_ends(fleet, api_keys_file=str(file), metrics_need_key=True) as front_ends,
        aiohttp.ClientSession() as session,
    ):
        for address in (front_ends.router.addresses.http, front_ends.router.addresses.metrics):
            for headers, status in (({}, 401), ({"authorization": f"Bearer {key}"}, 200)):
                async with session.get(f"http://{address}/metrics", headers=headers) as answer:
                    assert answer.status == status
        async with session.get(f"{front_ends.url}/health") as answer:
            assert answer.status == 200


async def test_a_router_that_has_just_started_waits_for_its_workers(
    fleet: StubFleet, model_folder: Path
) -> None:
    """Connections to a shared port reach it before the directory has told it of any."""
    await fleet.add(Role.DECODE)
    router = Router(RouterConfig(model_path=str(model_folder)), secret=fleet.secret)
    await router.start(http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0)
    try:
        async with aiohttp.ClientSession() as session:
            url = f"http://{router.addresses.http}/v1/completions"

            async def ask() -> int:
                async with session.post(url, json={"prompt": "a", "max_tokens": 2}) as answer:
                    return answer.status

            asked = asyncio.create_task(ask())
            await asyncio.sleep(0.2)
            assert not asked.done()
            router.set_workers(fleet.refs)
            assert await asked == 200
            router.set_workers([])
            await asyncio.sleep(0)
            assert await ask() == 503
    finally:
        await router.stop()
