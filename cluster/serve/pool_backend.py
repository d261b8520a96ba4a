"""How the autoscaler changes pools: through Ray Serve, and by draining workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from cluster.config.schema import ClusterConfig
from cluster.membership.table import Pool, View
from cluster.scaling.autoscaler import RunningPool
from cluster.serve.admin import drain_worker, ray_errors_as_unavailable, set_role
from cluster.serve.control import pool_statuses
from cluster.serve.deployments import scale
from protocol.ids import Role

_KV_NAMESPACE = b"baton"


class ServePools:
    """Implements cluster.scaling.autoscaler.PoolBackend. Pins outlive the process: they are in
    Ray's own store, under a name that only this cluster has."""

    def __init__(self, config: ClusterConfig, secret: bytes, view: Callable[[], View]) -> None:
        self._config = config
        self._secret = secret
        self._view = view
        self._key = b"pins-" + hashlib.sha256(secret).hexdigest()[:16].encode()

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
        with ray_errors_as_unavailable():
            stored = _internal_kv_get(self._key, namespace=_KV_NAMESPACE)
        return [Role(name) for name in json.loads(stored or b"[]")]

    def pin(self, roles: Iterable[Role]) -> None:
        """Record which pools are pinned."""
        names = json.dumps(sorted(role.value for role in roles)).encode()
        with ray_errors_as_unavailable():
            _internal_kv_put(self._key, names, overwrite=True, namespace=_KV_NAMESPACE)
