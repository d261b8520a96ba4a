"""A router over stub workers, and clients for both doors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc import aio

from protocol.ids import Role
from protocol.wire import inference_pb2_grpc as pb_grpc
from router.config import RouterConfig
from router.server import Router
from router.text.tokenizer import ModelText
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import smollm2_folder, write_model_text


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def text(model_folder: Path) -> ModelText:
    return ModelText(model_folder)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    folder = smollm2_folder()
    if folder is None:
        pytest.skip("smollm2-135m is not there; run: baton models get smollm2-135m")
    return folder


@pytest.fixture
async def fleet() -> AsyncIterator[StubFleet]:
    fleet = StubFleet()
    yield fleet
    await fleet.stop()


class Doors:
    """A started router and a client for each of its doors."""

    def __init__(self, router: Router, session: aiohttp.ClientSession) -> None:
        self.router = router
        self.http = session
        self.channel = aio.insecure_channel(router.addresses.grpc)
        self.inference = pb_grpc.InferenceStub(self.channel)
        self.admin = pb_grpc.AdminStub(self.channel)

    @property
    def url(self) -> str:
        return f"http://{self.router.addresses.http}"

    async def post(self, path: str, body: object) -> tuple[int, dict]:
        kwargs = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def wait_ready(self, decodes: int = 1, prefills: int = 0) -> None:
        members = self.router._members
        while (
            len(members.ready(Role.DECODE)) < decodes or len(members.ready(Role.PREFILL)) < prefills
        ):
            await members.changed(5)


MakeDoors = Callable[..., contextlib.AbstractAsyncContextManager[Doors]]


@pytest.fixture
def make_doors(model_folder: Path) -> MakeDoors:
    """Start a router over a fleet's workers: `async with make_doors(fleet, **config) as doors`."""

    @contextlib.asynccontextmanager
    async def make(fleet: StubFleet, *, admin=None, **settings: object) -> AsyncIterator[Doors]:
        defaults = {
            "model_path": str(model_folder),
            "local_prefill_tokens": 4,
            "silence_s": 1.0,
            "connect_timeout_s": 2.0,
        }
        router = Router(RouterConfig(**(defaults | settings)), secret=fleet.secret, admin=admin)
        await router.start(http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0)
        try:
            async with aiohttp.ClientSession() as session:
                doors = Doors(router, session)
                router.set_workers(fleet.refs)
                if fleet.workers:
                    roles = [worker.role for worker in fleet.workers]
                    await doors.wait_ready(roles.count(Role.DECODE), roles.count(Role.PREFILL))
                try:
                    yield doors
                finally:
                    await doors.channel.close()
        finally:
            await router.stop()

    return make


@pytest.fixture
async def doors(fleet: StubFleet, make_doors: MakeDoors) -> AsyncIterator[Doors]:
    """A router over one prefill and one decode worker."""
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with make_doors(fleet) as doors:
        yield doors


def status_of(error: aio.AioRpcError) -> tuple[grpc.StatusCode, dict[str, str | bytes]]:
    """A failed call's code and trailers."""
    return error.code(), dict(error.trailing_metadata() or ())
