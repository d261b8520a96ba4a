"""Clients for both front ends of a router under test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import grpc
from grpc import aio

from observability.tracing import Tracing
from protocol.ids import Role
from router.admin import AdminBackend
from router.config import RouterConfig
from router.server import Router
from router.text.detokenizer import _byte_alphabet
from tests.support import services
from tests.support.stub_workers import StubFleet


class FrontEnds:
    """A started router and a client for each of its front ends."""

    def __init__(self, router: Router, session: aiohttp.ClientSession, fleet: StubFleet) -> None:
        self.router = router
        self.fleet = fleet
        self.http = session
        self.channel = aio.insecure_channel(router.addresses.grpc)
        self.inference = services.InferenceStub(self.channel)
        self.admin = services.AdminStub(self.channel)

    @property
    def url(self) -> str:
        return f"http://{self.router.addresses.http}"

    async def post(self, path: str, body: object) -> tuple[int, dict]:
        kwargs = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def wait_ready(self, decodes: int = 1, prefills: int = 0) -> None:
        members = self.router._workers
        while (
            len(members.ready(Role.DECODE)) < decodes or len(members.ready(Role.PREFILL)) < prefills
        ):
            await members.changed(5)

    def say(self, ids: Sequence[int]) -> None:
        """Let every worker write this."""
        for worker in self.fleet.workers:
            worker.script = lambda _: ids


MakeFrontEnds = Callable[..., contextlib.AbstractAsyncContextManager[FrontEnds]]


@contextlib.asynccontextmanager
async def open_front_ends(
    fleet: StubFleet,
    model_folder: Path,
    *,
    admin: AdminBackend | None = None,
    tracing: Tracing | None = None,
    **settings: object,
) -> AsyncIterator[FrontEnds]:
    """A router over a fleet's workers, ready, with clients for both front ends."""
    defaults = {
        "model_path": str(model_folder),
        "local_prefill_tokens": 4,
        "silence_s": 60.0,  # however busy the machine is
        "connect_timeout_s": 2.0,
    }
    config = RouterConfig(**(defaults | settings))  # type: ignore[arg-type]
    router = Router(config, secret=fleet.secret, admin=admin, tracing=tracing)
    await router.start(http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0)
    try:
        async with aiohttp.ClientSession() as session:
            front_ends = FrontEnds(router, session, fleet)
            router.set_workers(fleet.refs)
            roles = [worker.role for worker in fleet.workers]
            await front_ends.wait_ready(roles.count(Role.DECODE), roles.count(Role.PREFILL))
            try:
                yield front_ends
            finally:
                await front_ends.channel.close()
    finally:
        await router.stop()


def status_of(error: aio.AioRpcError) -> tuple[grpc.StatusCode, dict[str, str | bytes]]:
    """A failed call's code and trailers."""
    return error.code(), dict(error.trailing_metadata() or ())


def letters(text: str) -> list[int]:
    """A text as single bytes of the tiny vocabulary: the ids after 3 special ones are the bytes in
    the order of GPT-2's alphabet."""
    alphabet = sorted(_byte_alphabet().items())
    place = {byte: 3 + i for i, (_, byte) in enumerate(alphabet)}
    return [place[byte] for byte in text.encode()]


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return once `condition` holds; fail when it does not, however busy the machine is."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
