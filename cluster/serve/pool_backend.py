"""How the autoscaler changes pools: through Ray Serve, and by draining workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from cluster.config.schema import ClusterConfig
from cluster.membership.store import ClusterStore, ray_errors_as_unavailable
from cluster.membership.table import Pool, View
from cluster.scaling.autoscaler import RunningPool
from cluster.serve.admin import drain_worker, set_role
from cluster.serve.control import pool_statuses
from cluster.serve.deployments import scale
from protocol.ids import Role

_PINS = "pins"


class ServePools:
    """Implements cluster.scaling.autoscaler.PoolBackend. Pins outlive the process."""

    def __init__(self, config: ClusterConfig, secret: bytes, view: Callable[[], View]) -> None:
        self._config = config
        self._secret = secret
        self._view = view
        self._store = ClusterStore(secret)

    def sizes(self) -> dict[Role, RunningPool]:
        """Both pools, as Serve has them."""
        with ray_errors_as_unavailable():
            statuses = pool_statuses()
        sizes = {}
        for role in Role:
            status = statuses.get(Pool(role))
            running = status.running if status else frozenset()
            target = status.target if status else None
            sizes[role] = RunningPool(
                # Until Serve has a pool, it is about to get the configured one.
                wanted=self._config.pool(role).replicas if target is None else target,
                running=frozenset(f"{role}-{replica}" for replica in running),
            )
        return sizes

    def scale(self, sizes: Mapping[Role, int]) -> None:
        """Set the sizes. Raises InvalidRequest when the cluster has no room."""
        with ray_errors_as_unavailable():
            scale(self._config, {Pool(role): size for role, size in sizes.items()})

    async def drain(self, worker_id: str) -> None:
        await drain_worker(self._view(), worker_id, secret=self._secret)

    async def change_role(self, worker_id: str, role: Role) -> None:
        await set_role(self._view(), worker_id, role, secret=self._secret)

    def pinned(self) -> list[Role]:
        """The pools that are pinned, as of the last `pin`."""
        return [Role(name) for name in json.loads(self._store.get(_PINS) or b"[]")]

    def pin(self, roles: Iterable[Role]) -> None:
        """Record which pools are pinned."""
        names = json.dumps(sorted(role.value for role in roles)).encode()
        self._store.put(_PINS, names)
