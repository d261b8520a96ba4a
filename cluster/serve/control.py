"""What Baton asks of a running Serve: its pools' state, their scale, and the end of it all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from cluster.call_timeout import ANSWER_S, within
from cluster.membership.table import MemberKind
from protocol.errors import NotFound, Unavailable

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """A pool as Serve sees it: how many replicas it wants (None: it is about to be made), and how
    many are in which state.

    failed: new replicas could not be constructed; Serve goes on trying where others already run.
    """

    kind: MemberKind
    target: int | None
    replicas: Mapping[str, int]
    healthy: bool
    failed: bool
    message: str


def set_replicas(kind: MemberKind, replicas: int) -> bool:
    """Set a pool's target through Serve's external scaling; False when Serve has no such pool.

    Raises NotFound when Serve does not run, Unavailable when it does not answer.
    """
    deployment = DeploymentID(name=kind.value, app_name=kind.value)
    if kind not in pool_statuses():
        return False
    _ask("update_deployment_replicas", deployment, replicas)
    return True


def pool_statuses() -> dict[MemberKind, PoolStatus]:
    """Every pool that Serve knows."""
    known = _applications()
    return {
        kind: _pool_status(kind, known[kind.value]) for kind in MemberKind if kind.value in known
    }


def undeploy(timeout_s: float) -> None:
    """Drain and end the routers, then the workers, which what they had accepted still needed, and
    Serve itself unless it runs something else, too. Raises Unavailable, naming the pools that
    are still there after `timeout_s`, or when Serve does not answer."""
    deadline = time.monotonic() + timeout_s
    try:
        _delete((MemberKind.ROUTER,), deadline)
        _delete((MemberKind.PREFILL, MemberKind.DECODE), deadline)
        if not _applications():
            _ask("graceful_shutdown")
    except (NotFound, RayActorError):
        pass  # no controller, or it has ended as asked


def _delete(kinds: Sequence[MemberKind], deadline: float) -> None:
    _ask("delete_apps", [kind.value for kind in kinds])
    while left := pool_statuses().keys() & kinds:
        if time.monotonic() > deadline:
            raise Unavailable(f"not ended in time: {', '.join(sorted(left))}")
        time.sleep(_LOOK_S)


def _applications() -> Mapping[str, Any]:
    applications: Mapping[str, Any] = _ask("get_serve_instance_details").get("applications", {})
    return applications


def _ask(method: str, *arguments: object) -> Any:
    """What a method of Serve's controller returns. Raises Unavailable when it does not in time."""
    try:
        return ray.get(getattr(_controller(), method).remote(*arguments), timeout=ANSWER_S)
    except GetTimeoutError:
        raise Unavailable(
            f"Ray Serve's controller did not answer {method} within {ANSWER_S:.0f} s"
        ) from None


def _controller() -> Any:
    """Serve's controller. Raises NotFound when Serve does not run."""

    def find() -> Any:
        return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)

    try:
        return within(ANSWER_S, "Ray did not find Ray Serve's controller", find)
    except ValueError as error:
        raise NotFound("Ray Serve does not run on this cluster") from error


def _pool_status(kind: MemberKind, application: Mapping[str, Any]) -> PoolStatus:
    deployment = application.get("deployments", {}).get(kind.value, {})
    counts = Counter(replica["state"] for replica in deployment.get("replicas", ()))
    messages = (application.get("message", ""), deployment.get("message", ""))
    states = (application.get("status"), deployment.get("status"))
    return PoolStatus(
        kind=kind,
        target=deployment.get("target_num_replicas"),
        replicas=counts,
        healthy=deployment.get("status") == "HEALTHY",
        failed="DEPLOY_FAILED" in states
        or deployment.get("status_trigger") == "REPLICA_STARTUP_FAILED",
        message=next((text for text in reversed(messages) if text), ""),
    )
