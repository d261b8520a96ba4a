"""The three Serve deployments, each an application of its own.

Separate applications keep the pools apart: their state, failures, scale and updates never meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray._private.state import available_resources_per_node
from ray.serve.api import RunTarget
from ray.serve.config import ProxyLocation

from cluster.call_timeout import ANSWER_S, within
from cluster.config.checks import Node, check_devices, check_resources, demands_of
from cluster.config.schema import ClusterConfig, PlacementSection
from cluster.membership.table import MemberKind
from cluster.serve.control import pool_statuses, set_replicas
from cluster.serve.follower_rank import process_env, runtime_env
from cluster.serve.router_replica import RouterReplica
from cluster.serve.worker_replica import WorkerReplica
from protocol.ids import Role

#: Added to the drain so that Serve does not kill a replica that is just about to be done.
_GRACE_S = 10.0
_CONSTRUCTOR_TRIES = 2


def deploy(config: ClusterConfig) -> None:
    """Hand the applications to Serve, and return at once. Serve's own proxies stay off: the routers
    listen themselves. A pool of no replicas is left out (Serve knows none); `scale` brings it.
    Raises Unavailable when Serve has not taken them within the time of a start."""
    roles = [role for role in Role if config.pool(role).replicas > 0]
    targets = [_target(pool_application(config, role), role.value) for role in roles]
    _run(config, [*targets, _target(router_application(config), MemberKind.ROUTER.value)])


def scale(config: ClusterConfig, wanted: Mapping[MemberKind, int]) -> None:
    """Set pools' numbers of replicas. Serve starts or drains the difference and touches nothing
    else: neither a pool's other replicas nor other pools. `config` makes a pool that is not
    there yet. Raises NotFound when Serve does not run, and InvalidRequest before anything changes
    when a pool is to grow and the cluster is too small for it (who leaves another makes room), or
    when the configuration has no device for it."""
    if wanted.get(MemberKind.PREFILL):
        check_devices(config)
    if not config.ray.autoscaling:
        sizes = {kind: pool.target or 0 for kind, pool in pool_statuses().items()}
        # A smaller pool is what a cluster needs that has lost a machine.
        if any(replicas > sizes.get(kind, 0) for kind, replicas in wanted.items()):
            sizes |= wanted
            demands = [
                replace(d, replicas=sizes.get(MemberKind(d.pool), 0)) for d in demands_of(config)
            ]
            check_resources(demands, nodes())
    for kind, replicas in wanted.items():
        if set_replicas(kind, replicas) or replicas == 0 or kind is MemberKind.ROUTER:
            continue
        application = pool_application(config, Role(kind), replicas=replicas)
        _run(config, [_target(application, kind.value)])


def nodes(*, free: bool = False) -> list[Node]:
    """What each node has, or what of it is `free` now."""
    left, found = within(
        ANSWER_S,
        "Ray did not say which nodes it has",
        lambda: (available_resources_per_node() if free else {}, ray.nodes()),
    )
    return [
        Node(
            resources=dict(left.get(node["NodeID"], {}) if free else node["Resources"]),
            labels=dict(node.get("Labels", {})),
        )
        for node in found
        if node["Alive"]
    ]


def _run(config: ClusterConfig, targets: list[RunTarget]) -> None:
    def run() -> None:
        serve.start(proxy_location=ProxyLocation.Disabled)
        serve.run_many(
            targets,
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    within(config.lifecycle.start_timeout_s, "Ray Serve did not take the applications", run)


def pool_application(config: ClusterConfig, role: Role, *, replicas: int | None = None) -> Any:
    """The application of one pool of workers, of as many as configured unless `replicas` says."""
    pool = config.pool(role)
    options = _options(config, pool.placement, process_env(pool))
    options |= _group(pool.placement, pool.engine.tp_size)
    deployment = serve.deployment(WorkerReplica, name=role.value).options(
        num_replicas=pool.replicas if replicas is None else replicas, **options
    )
    return deployment.bind(role, config)


def router_application(config: ClusterConfig) -> Any:
    """The application of the routers."""
    section = config.router
    options = _options(config, section.placement, dict(section.placement.env))
    options |= _group(section.placement, 1)
    deployment = serve.deployment(RouterReplica, name=MemberKind.ROUTER.value).options(
        num_replicas=section.replicas, **options
    )
    return deployment.bind(config, scale)


def _options(config: ClusterConfig, placement: PlacementSection, env: Mapping[str, str]) -> Any:
    times = config.lifecycle
    return {
        "ray_actor_options": {
            "num_cpus": placement.cpus,
            "num_gpus": placement.gpus,
            "runtime_env": runtime_env(env),
        },
        # Replicas answer no calls through Serve, except its own checks.
        "max_ongoing_requests": 100,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": times.drain_s + _GRACE_S,
        "health_check_period_s": times.health_period_s,
        "health_check_timeout_s": times.health_timeout_s,
        "max_constructor_retry_count": _CONSTRUCTOR_TRIES,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
    }


def _group(placement: PlacementSection, ranks: int) -> dict[str, Any]:
    """A placement group for the replica: one bundle per rank, all on one node."""
    group: dict[str, Any] = {
        "placement_group_bundles": [placement.bundle() for _ in range(ranks)],
        "placement_group_strategy": "STRICT_PACK",
    }
    if placement.labels:
        group["placement_group_bundle_label_selector"] = [dict(placement.labels)] * ranks
    return group


def _target(application: Any, name: str) -> RunTarget:
    return RunTarget(target=application, name=name, route_prefix=None, external_scaler_enabled=True)
