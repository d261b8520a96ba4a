"""Steering the cluster through a router's admin service (baton.v1.Admin)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from ray.exceptions import RayError

from cluster.config.schema import ClusterConfig
from cluster.membership.table import Member, MemberKind, View
from cluster.serve.control import pool_statuses
from protocol.errors import NotFound, Unavailable
from protocol.messages import DrainCommand
from protocol.states import WorkerState
from router.admin import ClusterInfo, PoolInfo, RouterInfo
from rpc.methods import DRAIN
from rpc.service import ControlClient

R = TypeVar("R")
_CALL_S = 5.0
#: Sets pools' sizes: cluster.serve.deployments.scale.
Scale = Callable[[ClusterConfig, Mapping[MemberKind, int]], None]


class ClusterAdmin:
    """What a router's admin service calls; satisfies router.admin.AdminBackend."""

    def __init__(
        self, directory: Any, config: ClusterConfig, *, secret: bytes, scale: Scale
    ) -> None:
        self._directory = directory
        self._config = config
        self._secret = secret
        self._scale = scale
        # Serve may be away for as long as it likes: that must not take the threads of requests.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="serve")

    async def view(self, own: ClusterInfo) -> ClusterInfo:
        """The router's own view, with what the directory and Serve know beyond it."""
        with _typed():
            view = await self._members()
            async with asyncio.timeout(_CALL_S):
                targets = await self._in_thread(pool_statuses)
        pools = tuple(_with_target(pool, targets) for pool in own.pools)
        known = {router.grpc_address for router in own.routers}
        others = tuple(_router(m) for m in view.of(MemberKind.ROUTER) if m.grpc not in known)
        return dataclasses.replace(own, pools=pools, routers=own.routers + others)

    async def scale(self, *, prefill: int | None, decode: int | None) -> None:
        """Set the targets of the pools named."""
        given = {MemberKind.PREFILL: prefill, MemberKind.DECODE: decode}
        wanted = {kind: replicas for kind, replicas in given.items() if replicas is not None}
        with _typed():
            await self._in_thread(partial(self._scale, self._config, wanted))

    async def drain(self, worker_id: str) -> None:
        """Tell one worker to refuse new work; it is replaced when it is done."""
        with _typed():
            view = await self._members()
        await drain_worker(view, worker_id, secret=self._secret)

    async def _members(self) -> View:
        async with asyncio.timeout(_CALL_S):
            view: View = await self._directory.view.remote()
        return view

    async def _in_thread(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@contextmanager
def _typed() -> Iterator[None]:
    """What Ray raises, as the typed error of a cluster that does not answer."""
    try:
        yield
    except (RayError, TimeoutError) as error:
        raise Unavailable(f"the cluster does not answer: {type(error).__name__}") from error


async def drain_worker(view: View, worker_id: str, *, secret: bytes) -> Member:
    """Send the drain command to the worker of this id. Raises NotFound naming those there are."""
    workers = [member for member in view.members if member.kind is not MemberKind.ROUTER]
    found = next((member for member in workers if member.name == worker_id), None)
    if found is None:
        names = ", ".join(member.name for member in workers) or "none"
        raise NotFound(f"no worker {worker_id!r}; there are: {names}", param="worker_id")
    client = ControlClient(found.address, secret=secret)
    try:
        await client.call(DRAIN, DrainCommand(), timeout_s=_CALL_S)
    finally:
        await client.close()
    return dataclasses.replace(found, state=WorkerState.DRAINING)


def _with_target(pool: PoolInfo, targets: Any) -> PoolInfo:
    status = targets.get(MemberKind(pool.role))
    return pool if status is None else dataclasses.replace(pool, target=status.target)


def _router(member: Member) -> RouterInfo:
    return RouterInfo(
        router_id=member.name,
        http_address=member.http,
        grpc_address=member.grpc,
        state=member.state.value,
        requests=0,
    )
