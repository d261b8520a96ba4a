"""Views of the cluster, and the operations that the admin service needs of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
class PoolSize:
    """How many workers an autoscaled pool should have. pinned: an operator set it."""

    role: Role
    wanted: int
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """One pool. `target` is how many replicas are wanted, None when that is not known here.

    Of an autoscaled pool: `bounds` (least, most), whether an operator pinned its size, and the
    reason of its size.
    """

    role: Role
    workers: tuple[WorkerInfo, ...]
    target: int | None = None
    bounds: tuple[int, int] | None = None
    pinned: bool = False
    reason: str = ""


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

    async def scale(self, sizes: Mapping[Role, int], automatic: Collection[Role] = ()) -> None:
        """Change the wanted size of pools, which pins an autoscaled pool; leave those in
        `automatic` to the autoscaler again. Returns once the change is accepted."""

    async def drain(self, worker_id: str) -> None:
        """Let one worker finish what it has and take nothing new. NotFound if there is none."""
