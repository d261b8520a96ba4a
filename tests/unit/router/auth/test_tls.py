"""Both front ends over TLS, with and without certificates of the clients."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc import aio

from benchmarks import serve
from cluster.bench.runs import measure
from cluster.cli.arguments import make_parser
from cluster.cli.generate import open_client
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.auth.tls import Tls, TlsConfig
from router.config import RouterConfig
from router.server import Router
from tests.support import services
from tests.support.certificates import Authority, Pair
from tests.support.router_front_ends import until
from tests.support.stub_workers import StubFleet

BODY = {"prompt": "hello", "max_tokens": 4}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def serving(fleet: StubFleet, model_folder: Path, tls: TlsConfig) -> AsyncIterator[Router]:
    await fleet.add(Role.DECODE)
    router = Router(RouterConfig(model_path=str(model_folder), tls=tls), secret=fleet.secret)
    await router.start(http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0)
    try:
        router.set_workers(fleet.refs)
        await until(lambda: router.ready)
        yield router
    finally:
        await router.stop()


def context(ca_file: str, client: Pair | None = None) -> ssl.SSLContext:
    trusting = ssl.create_default_context(cafile=ca_file)
    if client is not None:
        trusting.load_cert_chain(client.cert, client.key)
    return trusting


def read(path: str) -> bytes:
    return Path(path).read_bytes()


async def ask_http(router: Router, trusting: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(verify=trusting) as client:
        url = f"https://{router.addresses.http}/v1/completions"
        return (await client.post(url, json=BODY)).status_code


async def ask_grpc(router: Router, authority: Authority, client: Pair | None = None) -> int:
    pair = (None, None)
    if client is not None:
        pair = (read(client.key), read(client.cert))
    credentials = grpc.ssl_channel_credentials(authority.pem, *pair)
    async with aio.secure_channel(router.addresses.grpc, credentials) as channel:
        stub = services.InferenceStub(channel)
        messages = [m async for m in stub.Generate(pb.GenerateRequest(**BODY), timeout=60)]
        return messages[-1].usage.completion_tokens


async def test_tls_on_both_front_ends(
    fleet: StubFleet, model_folder: Path, authority: Authority
) -> None:
    own = authority.issue("server")
    async with serving(
        fleet, model_folder, TlsConfig(cert_file=own.cert, key_file=own.key)
    ) as router:
        assert await ask_http(router, context(authority.ca_file)) == 200
        assert await ask_grpc(router, authority) == 4
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://{router.addresses.http}/health")
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(f"https://{router.addresses.http}/health")


async def test_mutual_tls_on_both_front_ends(
    fleet: StubFleet, model_folder: Path, authority: Authority, tmp_path: Path
) -> None:
    own, known = authority.issue("server"), authority.issue("client")
    stranger = Authority(tmp_path, "other").issue("stranger")
    tls = TlsConfig(cert_file=own.cert, key_file=own.key, client_ca_file=authority.ca_file)
    async with serving(fleet, model_folder, tls) as router:
        assert await ask_http(router, context(authority.ca_file, known)) == 200
        assert await ask_grpc(router, authority, known) == 4
        for client in (None, stranger):
            with pytest.raises(httpx.TransportError):
                await ask_http(router, context(authority.ca_file, client))
            with pytest.raises(aio.AioRpcError) as caught:
                await ask_grpc(router, authority, client)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        options = make_parser().parse_args(
            [
                *("generate", "hello", "--max-tokens", "4", "--tls-ca", authority.ca_file),
                *("--tls-cert", known.cert, "--tls-key", known.key),
            ]
        )
        with open_client(router.addresses.grpc, options) as client:
            output = await asyncio.to_thread(client.generate("hello", max_tokens=4).answer)
        assert output.usage.completion_tokens == 4


@pytest.mark.parametrize("front_end", ["https", "grpc"])
async def test_the_load_generator_is_let_in(
    front_end: str, fleet: StubFleet, model_folder: Path, authority: Authority
) -> None:
    own, known = authority.issue("server"), authority.issue("client")
    tls = TlsConfig(cert_file=own.cert, key_file=own.key, client_ca_file=authority.ca_file)
    load = ["--concurrency", "1", "--requests", "2", "--repeats", "1", "--warmup", "0"]
    load += ["--prompt-tokens", "5", "--output-tokens", "4", "--vocab-size", "400"]
    certificates = ["--tls-cert", known.cert, "--tls-key", known.key]
    async with serving(fleet, model_folder, tls) as router:
        address = {"https": router.addresses.http, "grpc": router.addresses.grpc}[front_end]
        arguments = ["--url", f"{front_end}://{address}", "--tls-ca", authority.ca_file, *load]
        (one,) = await measure(serve.parser().parse_args([*arguments, *certificates]))
        assert [(repeat.failures, repeat.output_tokens) for repeat in one.run.repeats] == [(0, 8)]
        stranger = serve.parser().parse_args([*arguments, "--model", "m"])
        (one,) = await measure(stranger)
        assert [repeat.failures for repeat in one.run.repeats] == [2]


async def test_a_renewed_certificate_is_taken_without_a_restart(
    fleet: StubFleet, model_folder: Path, authority: Authority, tmp_path: Path
) -> None:
    own = authority.issue("server")
    async with serving(
        fleet, model_folder, TlsConfig(cert_file=own.cert, key_file=own.key)
    ) as router:
        assert await ask_http(router, context(authority.ca_file)) == 200
        shutil.copy(authority.ca_file, own.cert)  # the new certificate is there, its key is not
        await router._tls.refresh()
        assert await ask_http(router, context(authority.ca_file)) == 200
        later = Authority(tmp_path, "later")
        later.issue("server")
        await router._tls.refresh()
        assert await ask_http(router, context(later.ca_file)) == 200
        assert await ask_grpc(router, later) == 4
        with pytest.raises(httpx.ConnectError):
            await ask_http(router, context(authority.ca_file))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"cert_file": "c"}, "key_file is required"),
        ({"key_file": "k"}, "cert_file is required"),
        ({"client_ca_file": "k"}, "cert_file is required"),
    ],
)
def test_files_that_belong_together(fields: dict[str, str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        TlsConfig(**fields)


def test_files_that_do_not_load_are_named(authority: Authority, tmp_path: Path) -> None:
    own, other = authority.issue("server"), authority.issue("other")
    for fields, fault in (
        ({"cert_file": "none", "key_file": own.key}, "tls.cert_file none"),
        ({"cert_file": own.cert, "key_file": "none"}, "tls.key_file none"),
        ({"cert_file": own.cert, "key_file": other.key}, "tls.cert_file"),
        ({"cert_file": own.cert, "key_file": own.key, "client_ca_file": own.key}, "client_ca"),
    ):
        with pytest.raises(ValueError, match=fault):
            Tls(TlsConfig(**fields))
