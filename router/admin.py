"""Views of the cluster, and the operations that the admin service needs of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.ids import Role, WorkerRef
from protocol.messages import WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One worker. `state` is its own word, or `lost`; `in_flight` counts this router's requests."""

    ref: WorkerRef
    state: str
    load: WorkerLoad
    in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """One pool. `target` is how many replicas are wanted, None when that is not known here."""

    role: Role
    workers: tuple[WorkerInfo, ...]
    target: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterInfo:
    """One router. `requests` are the sequences it has in flight."""

    router_id: str
    http_address: str
    grpc_address: str
    state: str
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """The whole cluster, as far as it is known where it is asked."""

    model: str
    pools: tuple[PoolInfo, ...]
    routers: tuple[RouterInfo, ...]


class AdminBackend(Protocol):
    """Steers the cluster. Its errors are BatonErrors."""

    async def view(self, own: ClusterInfo) -> ClusterInfo:
        """The cluster, given this router's own view of it."""
        ...

    async def scale(self, *, prefill: int | None, decode: int | None) -> None:
        """Change the wanted size of the pools named; returns once the change is accepted."""
        ...

    async def drain(self, worker_id: str) -> None:
        """Let one worker finish what it has and take nothing new. NotFound if there is none."""
        ...
