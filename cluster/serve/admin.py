"""The backend of a router's admin service (baton.v1.Admin): view, scale and drain the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from cluster.config.schema import ClusterConfig
from cluster.membership.store import ray_errors_as_unavailable
from cluster.membership.table import Pool, Replica, View
from cluster.scaling.autoscaler import PoolScaling
from cluster.serve.control import PoolStatus, pool_statuses
from protocol.errors import BatonError, InvalidRequest, NotFound
from protocol.ids import Role
from protocol.messages import DrainCommand, RoleCommand, StatusQuery
from protocol.states import WorkerState
from router.admin import ClusterInfo, PoolInfo, RouterInfo
from rpc.client import ControlClient
from rpc.methods import DRAIN, ROLE, STATUS, Method, Rep, Req

R = TypeVar("R")
_CALL_S = 5.0
#: Sets pools' sizes: cluster.serve.deployments.scale.
Scale = Callable[[ClusterConfig, Mapping[Pool, int]], None]


class ClusterAdmin:
    """Implements router.admin.AdminBackend."""

    def __init__(self, directory: Any, *, secret: bytes, scale: Scale) -> None:
        self._directory = directory
        self._secret = secret
        self._scale = scale
        # Calls to a Serve that does not answer must not occupy the threads of requests.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="serve")

    async def view(self, own: ClusterInfo) -> ClusterInfo:
        """The router's own view, completed by the directory and Serve."""
        with ray_errors_as_unavailable():
            view = await self._view()
            async with asyncio.timeout(_CALL_S):
                statuses = await self._in_thread(pool_statuses)
            async with asyncio.timeout(_CALL_S):
                scalings = {s.role: s for s in await self._directory.scaling.remote()}
        pools = tuple(
            _completed(pool, statuses.get(Pool(pool.role)), scalings.get(pool.role))
            for pool in own.pools
        )
        known = {router.router_id for router in own.routers}
        others = tuple(_router(r) for r in view.of(Pool.ROUTER) if r.name not in known)
        return replace(own, pools=pools, routers=own.routers + others)

    async def scale(self, sizes: Mapping[Role, int], automatic: Collection[Role] = ()) -> None:
        """Set sizes, which pins autoscaled pools, and leave others to the autoscaler."""
        pin = self._directory.pin.remote
        with ray_errors_as_unavailable():
            if automatic:
                await pin(frozenset(automatic), False)
            if sizes:
                held = await pin(frozenset(sizes), True)
                targets = {Pool(role): size for role, size in sizes.items()}
                config = await self._directory.config.remote()
                try:
                    await self._in_thread(partial(self._scale, config, targets))
                except InvalidRequest:  # before any change
                    await pin(held, False)
                    raise

    async def drain(self, worker_id: str) -> None:
        """Tell one worker to refuse new requests; it is replaced once idle."""
        with ray_errors_as_unavailable():
            view = await self._view()
        await drain_worker(view, worker_id, secret=self._secret)

    async def _view(self) -> View:
        async with asyncio.timeout(_CALL_S):
            view: View = await self._directory.view.remote()
        return view

    async def _in_thread(self, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _completed(pool: PoolInfo, status: PoolStatus | None, scaling: PoolScaling | None) -> PoolInfo:
    """A pool as a router knows it, with what Serve and the autoscaler know."""
    if status is not None:
        pool = replace(pool, target=status.target)
    if scaling is not None:
        bounds = scaling.least, scaling.most
        pool = replace(pool, bounds=bounds, pinned=scaling.pinned, reason=scaling.reason)
    return pool


async def drain_worker(view: View, worker_id: str, *, secret: bytes) -> Replica:
    """Send the drain command to a worker. Raises NotFound with the ids of all workers."""
    worker = _find(view, worker_id)
    await _call(worker.address, DRAIN, DrainCommand(), secret)
    return structs.replace(worker, state=WorkerState.DRAINING)


async def set_role(view: View, worker_id: str, role: Role, *, secret: bytes) -> Replica:
    """Give a worker the work of a role from now on; what it decodes moves to the other decode
    workers. Raises NotFound with the ids of all workers, and InvalidRequest when none would be left
    to decode."""
    worker = _find(view, worker_id)
    if role is Role.PREFILL and not await _others_decode(view, worker_id, secret):
        raise InvalidRequest(f"{worker_id} is the only worker that decodes", param="role")
    await _call(worker.address, ROLE, RoleCommand(role=role), secret)
    return structs.replace(worker, role=role)


async def _others_decode(view: View, worker_id: str, secret: bytes) -> bool:
    """Whether another worker says that it decodes. A view lags: the latest change of a role may not
    be in it."""
    others = [ref for ref in view.ready_workers() if ref.worker_id != worker_id]
    for ref in sorted(others, key=lambda ref: ref.role is not Role.DECODE):
        try:
            status = await _call(ref.address, STATUS, StatusQuery(), secret)
        except BatonError:
            continue  # it cannot be counted on
        if status.role is Role.DECODE and status.state is WorkerState.READY:
            return True
    return False


def _find(view: View, worker_id: str) -> Replica:
    worker = next((w for w in view.workers() if w.name == worker_id), None)
    if worker is None:
        names = ", ".join(w.name for w in view.workers()) or "none"
        raise NotFound(f"no worker {worker_id!r}; there are: {names}", param="worker_id")
    return worker


async def _call(address: str, method: Method[Req, Rep], request: Req, secret: bytes) -> Rep:
    client = ControlClient(address, secret=secret)
    try:
        return await client.call(method, request, timeout_s=_CALL_S)
    finally:
        await client.close()


def _router(replica: Replica) -> RouterInfo:
    return RouterInfo(
        router_id=replica.name,
        http_address=replica.http,
        grpc_address=replica.grpc,
        state=replica.state.value,
        requests=0,
    )
