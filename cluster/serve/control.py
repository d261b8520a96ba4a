"""Calls to the controller of a running Ray Serve: pool status, scale, undeploy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from cluster.call_timeout import ANSWER_S, call_with_timeout
from cluster.membership.table import Pool
from cluster.ray_private import ControllerMethod, deployment_id, serve_controller
from protocol.errors import NotFound, Unavailable

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """A pool as Serve reports it.

    target: the number of replicas wanted; None while Serve is about to create the pool. replicas:
    counts by state. running: ids of the replicas that Serve considers healthy. failed: new replicas
    could not be constructed; Serve keeps trying where others already run.
    """

    pool: Pool
    target: int | None
    replicas: Mapping[str, int]
    healthy: bool
    failed: bool
    message: str
    running: frozenset[str] = frozenset()


def set_replicas(pool: Pool, replicas: int) -> bool:
    """Set a pool's target through Serve's external scaling; False when Serve has no such pool.

    Raises NotFound when Serve does not run, Unavailable when it does not answer.
    """
    if pool not in pool_statuses():
        return False
    _call(ControllerMethod.RESIZE, deployment_id(pool.value), replicas)
    return True


def pool_statuses() -> dict[Pool, PoolStatus]:
    known = _applications()
    return {pool: _pool_status(pool, known[pool.value]) for pool in Pool if pool.value in known}


def undeploy(timeout_s: float) -> None:
    """Drain and end the routers, then the workers, which serve accepted requests until then; then
    Serve itself unless it has other applications. Raises Unavailable, naming the pools that remain
    after `timeout_s`, or when Serve does not answer."""
    deadline = time.monotonic() + timeout_s
    try:
        _delete((Pool.ROUTER,), deadline)
        _delete((Pool.PREFILL, Pool.DECODE), deadline)
        if not _applications():
            _call(ControllerMethod.SHUT_DOWN)
    except (NotFound, RayActorError):
        pass  # no controller, or it has ended as asked


def _delete(pools: Sequence[Pool], deadline: float) -> None:
    _call(ControllerMethod.DELETE, [pool.value for pool in pools])
    while left := pool_statuses().keys() & pools:
        if time.monotonic() > deadline:
            raise Unavailable(f"not ended in time: {', '.join(sorted(left))}")
        time.sleep(_POLL_S)


def _applications() -> Mapping[str, Any]:
    applications: Mapping[str, Any] = _call(ControllerMethod.DETAILS).get("applications", {})
    return applications


def _call(method: ControllerMethod, *arguments: object) -> Any:
    """Call a method of Serve's controller. Raises Unavailable without an answer in time."""
    try:
        return ray.get(getattr(_controller(), method).remote(*arguments), timeout=ANSWER_S)
    except GetTimeoutError:
        raise Unavailable(
            f"Ray Serve's controller did not answer {method} within {ANSWER_S:.0f} s"
        ) from None


def _controller() -> Any:
    """Serve's controller. Raises NotFound when Serve does not run."""
    try:
        return call_with_timeout(
            ANSWER_S, "Ray did not find Ray Serve's controller", serve_controller
        )
    except ValueError as error:
        raise NotFound("Ray Serve does not run on this cluster") from error


def _pool_status(pool: Pool, application: Mapping[str, Any]) -> PoolStatus:
    deployment = application.get("deployments", {}).get(pool.value, {})
    messages = (deployment.get("message", ""), application.get("message", ""))
    # What Serve says of a pool until it looks at the latest change is of the one before.
    stale = application.get("status") == "DEPLOYING"
    return PoolStatus(
        pool=pool,
        target=deployment.get("target_num_replicas"),
        replicas=Counter(replica["state"] for replica in deployment.get("replicas", ())),
        running=frozenset(
            replica["replica_id"]
            for replica in deployment.get("replicas", ())
            if replica["state"] == "RUNNING"
        ),
        healthy=deployment.get("status") == "HEALTHY" and not stale,
        failed=not stale
        and (
            "DEPLOY_FAILED" in (application.get("status"), deployment.get("status"))
            or deployment.get("status_trigger") == "REPLICA_STARTUP_FAILED"
        ),
        message=next(filter(None, messages), ""),
    )
