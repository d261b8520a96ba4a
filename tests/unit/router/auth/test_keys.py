"""API keys: their file, their limits, and both front ends behind them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import openai
import pytest
import yaml
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protocol.errors import InvalidRequest, Overloaded, Unauthenticated
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.admission.limits import InflightLimits
from router.auth.keys import Caller, KeyFile, hashed, load_keys, new_key
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, status_of, until
from tests.support.stub_workers import StubFleet

USER, ADMIN, BOUNDED, FOREIGN = (new_key() for _ in range(4))
BODY = {"prompt": "hello", "max_tokens": 4}


def write(path: Path, *entries: dict) -> Path:
    path.write_text(yaml.safe_dump({"keys": list(entries)}))
    return path


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "keys.yaml",
        {"name": "user", "hash": hashed(USER)},
        {"name": "operator", "hash": hashed(ADMIN), "admin": True},
        {"name": "bounded", "hash": hashed(BOUNDED), "max_requests": 1, "requests_per_minute": 2},
        {"name": "foreign", "hash": hashed(FOREIGN), "models": ["another"]},
    )


@pytest.fixture
async def guarded(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, key_file: Path
) -> AsyncIterator[FrontEnds]:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, api_keys_file=str(key_file)) as front_ends:
        yield front_ends


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


# --- the file -------------------------------------------------------------------------------------


def test_a_key_finds_its_caller_and_nothing_else_does(key_file: Path) -> None:
    keys = load_keys(key_file, tiers=frozenset())
    assert keys.caller(f"Bearer {USER}").name == "user"
    assert keys.caller(f"bearer  {ADMIN} ").admin
    wrong = (None, "", USER, "Bearer ", f"Basic {USER}", f"Bearer {USER}x", f"Bearer {USER[:-1]}")
    for header in (*wrong, f"Bearer {hashed(USER)}", "Bearer \udcff"):
        with pytest.raises(Unauthenticated):
            keys.caller(header)


def test_two_hashes_are_one_caller_while_a_key_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "k", {"name": "a", "hash": [hashed(USER), hashed(ADMIN)]})
    keys = load_keys(path, tiers=frozenset())
    assert keys.caller(f"Bearer {USER}") is keys.caller(f"Bearer {ADMIN}")


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"hash": hashed(USER)}, "keys[0].name"),
        ({"name": "a\nb", "hash": hashed(USER)}, "keys[0].name must be printable"),
        ({"name": "a"}, "keys[0].hash"),
        ({"name": "a", "hash": USER}, "keys[0].hash"),
        ({"name": "a", "hash": "sha256:12"}, "keys[0].hash"),
        ({"name": "a", "hash": hashed(USER), "max_requests": 0}, "keys[0].max_requests"),
        ({"name": "a", "hash": hashed(USER), "weight": -1.0}, "keys[0].weight"),
        ({"name": "a", "hash": hashed(USER), "rpm": 3}, "keys[0].rpm"),
        ({"name": "a", "hash": hashed(USER), "service_tier": "x"}, "keys[0].service_tier"),
    ],
)
def test_a_wrong_entry_is_named_and_not_shown(tmp_path: Path, entry: dict, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)) as caught:
        load_keys(write(tmp_path / "k", entry), tiers=frozenset())
    assert USER not in str(caught.value)
    assert hashed(USER) not in str(caught.value)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="api_keys_file"):
        KeyFile(str(tmp_path / "none"))


async def test_the_file_is_taken_again_when_it_changes_and_only_if_it_loads(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "keys.yaml", {"name": "a", "hash": hashed(USER)})
    access = KeyFile(str(path))
    path.write_text("keys: nothing")
    await access.refresh()
    assert access.caller(f"Bearer {USER}").name == "a"
    write(path, {"name": "b", "hash": hashed(ADMIN)})
    await access.refresh()
    assert access.caller(f"Bearer {ADMIN}").name == "b"
    with pytest.raises(Unauthenticated):
        access.caller(f"Bearer {USER}")


# --- limits ---------------------------------------------------------------------------------------


def test_a_caller_has_bounds_of_its_own() -> None:
    admission = InflightLimits(limit=10, retry_after_s=1.0)
    small, other = Caller(name="small", max_requests=2), Caller(name="other")
    with admission.enter(2, small):
        with pytest.raises(Overloaded), admission.enter(1, small):
            pass
        with admission.enter(3, other):
            assert admission.in_flight == 5
    with admission.enter(2, small):
        pass
    with pytest.raises(InvalidRequest), admission.enter(3, small):
        pass
    assert admission.in_flight == 0


def test_requests_a_minute_are_counted_over_any_minute() -> None:
    now = 100.0
    admission = InflightLimits(limit=10, retry_after_s=1.0, clock=lambda: now)
    caller = Caller(name="a", requests_per_minute=2)
    with admission.enter(1, caller):
        now = 130.0
    with admission.enter(1, caller):
        now = 140.0
    with pytest.raises(Overloaded) as caught, admission.enter(1, caller):
        pass
    assert caught.value.retry_after_s == pytest.approx(20.0)
    now = 160.0
    with admission.enter(1, caller):
        pass
    with pytest.raises(Overloaded), admission.enter(1, caller):
        pass


# --- the front ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/version"),
        ("GET", "/no/such/path"),
    ],
)
async def test_http_needs_a_key(guarded: FrontEnds, method: str, path: str) -> None:
    for headers in ({}, bearer("baton-wrong"), {"Authorization": USER}):
        async with guarded.http.request(
            method, guarded.url + path, json=BODY, headers=headers
        ) as response:
            body = await response.json()
            assert response.status == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert body["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_need_none(guarded: FrontEnds, path: str) -> None:
    async with guarded.http.get(guarded.url + path) as response:
        assert response.status == 200


@pytest.mark.parametrize("shared", [False, True])
async def test_prefixes_are_private_to_a_key_unless_they_are_shared(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, key_file: Path, shared: bool
) -> None:
    worker = await fleet.add(Role.DECODE)
    settings = {"prefix_cache_per_key": False} if shared else {}
    async with make_front_ends(fleet, api_keys_file=str(key_file), **settings) as front_ends:
        for key in (USER, ADMIN, USER):
            async with front_ends.http.post(
                front_ends.url + "/v1/completions", json=BODY, headers=bearer(key)
            ) as response:
                assert response.status == 200
    salts = [submit.cache_salt for submit in worker.submitted]
    assert salts[0] == salts[2]
    assert (salts[0] == salts[1]) is shared


async def test_openai_client_with_a_key(guarded: FrontEnds) -> None:
    async with openai.AsyncOpenAI(api_key=USER, base_url=guarded.url + "/v1") as client:
        answer = await client.completions.create(model="tiny", **BODY)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert [model.id for model in (await client.models.list()).data] == ["tiny"]
    async with openai.AsyncOpenAI(api_key="x", base_url=guarded.url + "/v1") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with openai.AsyncOpenAI(api_key=FOREIGN, base_url=guarded.url + "/v1") as client:
        assert (await client.models.list()).data == []
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.completions.create(model="tiny", **BODY)
        assert caught.value.param == "model"


async def test_grpc_needs_a_key(guarded: FrontEnds) -> None:
    calls = [
        lambda **kw: guarded.inference.Generate(pb.GenerateRequest(**BODY), **kw).read(),
        lambda **kw: guarded.inference.ListModels(pb.ListModelsRequest(), **kw),
        lambda **kw: guarded.inference.Tokenize(pb.TokenizeRequest(prompt="a"), **kw),
        lambda **kw: guarded.inference.Detokenize(pb.DetokenizeRequest(tokens=[5]), **kw),
    ]
    for call in calls:
        for headers in ((), metadata("baton-wrong")):
            with pytest.raises(aio.AioRpcError) as caught:
                await call(metadata=headers)
            assert status_of(caught.value)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert await call(metadata=metadata(USER))


async def test_admin_needs_an_admin_key(guarded: FrontEnds) -> None:
    request = pb.GetClusterRequest()
    with pytest.raises(aio.AioRpcError) as caught:
        await guarded.admin.GetCluster(request)
    assert status_of(caught.value)[0] is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(aio.AioRpcError) as caught:
        await guarded.admin.GetCluster(request, metadata=metadata(USER))
    assert status_of(caught.value)[0] is grpc.StatusCode.PERMISSION_DENIED
    cluster = await guarded.admin.GetCluster(request, metadata=metadata(ADMIN))
    assert cluster.model == "tiny"


async def test_health_is_open_and_reflection_is_not(guarded: FrontEnds) -> None:
    health = health_pb2_grpc.HealthStub(guarded.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
    reflection = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
    with pytest.raises(aio.AioRpcError) as caught:
        await reflection.ServerReflectionInfo(iter(ask)).read()
    assert status_of(caught.value)[0] is grpc.StatusCode.UNAUTHENTICATED
    answer = await reflection.ServerReflectionInfo(iter(ask), metadata=metadata(USER)).read()
    assert "baton.v1.Inference" in {s.name for s in answer.list_services_response.service}


async def test_limits_of_a_key_on_both_front_ends(guarded: FrontEnds) -> None:
    for worker in guarded.fleet.workers:
        worker.gate = asyncio.Event()
    headers = bearer(BOUNDED)

    async def post() -> tuple[int, dict, str]:
        body = BODY | {"max_tokens": 20}
        async with guarded.http.post(
            guarded.url + "/v1/completions", json=body, headers=headers
        ) as r:
            return r.status, await r.json(), r.headers.get("retry-after", "")

    running = asyncio.create_task(post())
    await until(lambda: guarded.router.num_requests == 1)
    status, answer, retry = await post()
    assert (status, answer["error"]["code"]) == (429, "overloaded")
    assert int(retry) >= 1
    for worker in guarded.fleet.workers:
        worker.gate.set()
    assert (await running)[0] == 200
    assert (await post())[0] == 200  # the second of this minute
    with pytest.raises(aio.AioRpcError) as caught:
        await guarded.inference.Generate(
            pb.GenerateRequest(**BODY), metadata=metadata(BOUNDED)
        ).read()
    code, trailers = status_of(caught.value)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 50 < float(trailers["retry-after"]) <= 60


async def test_neither_keys_nor_prompts_reach_a_log(
    guarded: FrontEnds, caplog: pytest.LogCaptureFixture
) -> None:
    for logger in (None, "baton"):
        caplog.set_level(logging.DEBUG, logger)
    secret_words = "the prompt that is private"
    for key in (USER, "baton-wrong-but-private"):
        for body in ({"prompt": secret_words}, {"prompt": secret_words, "max_tokens": 10**9}):
            async with guarded.http.post(
                guarded.url + "/v1/completions", json=body, headers=bearer(key)
            ) as r:
                await r.read()
        request = pb.GenerateRequest(prompt=secret_words, max_tokens=2)
        try:
            async for _ in guarded.inference.Generate(request, metadata=metadata(key)):
                pass
        except aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED  # noqa: PT017
    logging.getLogger("baton.test").debug("the capture works")
    logged = "\n".join(f"{r.getMessage()} {vars(r)}" for r in caplog.records)
    assert "the capture works" in logged
    for secret in (USER, hashed(USER), "baton-wrong-but-private", "that is private"):
        assert secret not in logged


def test_limits_are_shared_out_over_routers() -> None:
    admission = InflightLimits(limit=100, retry_after_s=1.0)
    admission.num_routers = 2
    caller = Caller(name="k", max_requests=5, requests_per_minute=4)

    def enter_and_leave(sequences: int) -> None:
        with admission.enter(sequences, caller):
            pass

    with admission.enter(3, caller), pytest.raises(Overloaded, match="3 of its 3 sequences"):
        enter_and_leave(1)
    enter_and_leave(5)  # more than the share, but nothing else runs
    with pytest.raises(InvalidRequest, match="at most 5"):
        enter_and_leave(6)
    with pytest.raises(Overloaded, match="2 requests a minute"):
        enter_and_leave(1)


async def test_tokens_are_counted_by_key(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, tmp_path: Path
) -> None:
    key, file = new_key(), tmp_path / "keys.yaml"
    file.write_text(f"keys:\n- name: ann\n  hash: '{hashed(key)}'\n")
    worker = await fleet.add(Role.DECODE, cached_tokens=2)
    async with make_front_ends(fleet, api_keys_file=str(file)) as front_ends:
        url, headers = front_ends.url + "/v1/completions", {"authorization": f"Bearer {key}"}
        body = {"prompt": [30, 31, 32], "max_tokens": 4}
        for _ in range(2):
            async with front_ends.http.post(url, json=body, headers=headers) as response:
                assert response.status == 200
        text = (await front_ends.router.metrics_text()).decode()
    assert worker.cached_tokens == 2
    for kind, count in (("input", 2), ("cached", 4), ("output", 8)):
        (line,) = [row for row in text.splitlines() if f'kind="{kind}"' in row and "key_" in row]
        assert 'key="ann"' in line
        assert line.endswith(f" {count}.0")
