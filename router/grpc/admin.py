"""baton.v1.Admin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grpc import aio

from protocol.errors import InvalidRequest, Unsupported
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.admin import AdminBackend, ClusterInfo
from router.auth.keys import Caller
from router.grpc.answers import cluster_message
from router.grpc.requests import check_known

_Context = aio.ServicerContext[Any, Any]

_MAX_REPLICAS = 100_000


class AdminServicer:
    """The methods, as gRPC calls them. Without a backend they only show the cluster."""

    def __init__(self, own_view: Callable[[], ClusterInfo], backend: AdminBackend | None) -> None:
        self._own_view = own_view
        self._backend = backend

    async def get_cluster(
        self, request: pb.GetClusterRequest, _: _Context, __: Caller
    ) -> pb.Cluster:
        return cluster_message(await self._view())

    async def scale(self, request: pb.ScaleRequest, _: _Context, __: Caller) -> pb.Cluster:
        """Resize the named pools; returns the cluster after the change was accepted."""
        check_known(request)
        given = {
            Role.PREFILL: _replicas(request, "prefill", minimum=0),
            Role.DECODE: _replicas(request, "decode", minimum=1),
        }
        sizes = {role: size for role, size in given.items() if size is not None}
        automatic = {_automatic(name, sizes) for name in request.automatic}
        if not sizes and not automatic:
            raise InvalidRequest("prefill or decode is required", param="prefill")
        await self._required_backend().scale(sizes, automatic)
        return cluster_message(await self._view())

    async def drain(self, request: pb.DrainRequest, _: _Context, __: Caller) -> pb.DrainResponse:
        check_known(request)
        if not request.worker_id:
            raise InvalidRequest("worker_id is required", param="worker_id")
        await self._required_backend().drain(request.worker_id)
        return pb.DrainResponse()

    async def _view(self) -> ClusterInfo:
        own = self._own_view()
        return own if self._backend is None else await self._backend.view(own)

    def _required_backend(self) -> AdminBackend:
        if self._backend is None:
            raise Unsupported("this router was started without a cluster to change")
        return self._backend


def _automatic(name: str, sizes: Mapping[Role, int]) -> Role:
    if name not in list(Role):
        raise InvalidRequest(
            f"automatic: expected prefill or decode, got {name!r}", param="automatic"
        )
    if Role(name) in sizes:
        raise InvalidRequest(f"{name} cannot have a size and be automatic", param="automatic")
    return Role(name)


def _replicas(request: pb.ScaleRequest, name: str, *, minimum: int) -> int | None:
    if not request.HasField(name):
        return None
    value = int(getattr(request, name))
    if not minimum <= value <= _MAX_REPLICAS:
        raise InvalidRequest(
            f"{name} must be between {minimum} and {_MAX_REPLICAS}, got {value}", param=name
        )
    return value
