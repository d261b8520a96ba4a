"""The Serve deployments of routers, prefill and decode workers.

Each is an application of its own, so that status, failures, scale and updates of the pools stay
independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.api import RunTarget
from ray.serve.config import ProxyLocation

from cluster.call_timeout import ANSWER_S, call_with_timeout
from cluster.config.checks import Node, check_devices, check_resources, demands_of
from cluster.config.schema import ClusterConfig, PlacementSection
from cluster.membership.store import ClusterStore
from cluster.membership.table import Pool
from cluster.models.store import find_model
from cluster.ray_private import available_resources_per_node
from cluster.serve.changes import Deployed, describe, pool_models
from cluster.serve.control import pool_statuses, set_replicas
from cluster.serve.follower_rank import process_env, runtime_env
from cluster.serve.router_replica import RouterReplica
from cluster.serve.worker_replica import WorkerReplica
from protocol.ids import Role

#: Added to the drain time, so that Serve does not kill a replica that is about to finish.
_GRACE_S = 10.0
_CONSTRUCTOR_TRIES = 2
#: Per cent of a pool, rounded up to whole replicas.
_ONE_MORE = 1


def deploy(config: ClusterConfig, secret: bytes) -> None:
    """Hand the applications to Serve and return at once. Serve's own proxies stay off: the routers
    listen themselves. A pool of no replicas is left out, as Serve has none such; `scale` creates
    it. Raises Unavailable when Serve does not accept them within the start timeout."""
    pools = [Pool(role) for role in Role if config.pool(role).replicas > 0]
    _run(config, [_target(application(config, pool), pool) for pool in (*pools, Pool.ROUTER)])
    for pool in Pool:
        record(secret, pool, describe_pool(config, pool))


def redeploy(
    config: ClusterConfig, pool: Pool, *, replicas: int, spare: bool, secret: bytes
) -> None:
    """Have Serve replace a pool's replicas by those of another configuration, one after another;
    return at once. spare: there is room for one more, so that each is replaced before it stops."""
    changed = application(config, pool, replicas=replicas, spare=spare)
    _run(config, [_target(changed, pool)])
    record(secret, pool, describe_pool(config, pool))


def describe_pool(config: ClusterConfig, pool: Pool) -> Deployed:
    """What a pool is deployed with, by this machine's copy of its model."""
    return describe(config, pool, find_model(pool_models(config)[pool]))


def record(secret: bytes, pool: Pool, deployed: Deployed) -> None:
    """Keep what a pool was deployed with, for `recorded`."""
    ClusterStore(secret).put(f"deployed-{pool}", deployed.encoded())


def recorded(secret: bytes) -> dict[Pool, Deployed | None]:
    store = ClusterStore(secret)
    return {pool: Deployed.decoded(store.get(f"deployed-{pool}")) for pool in Pool}


def scale(config: ClusterConfig, targets: Mapping[Pool, int]) -> None:
    """Set pools' numbers of replicas. Serve starts or drains the difference; other replicas and
    pools keep running. `config` describes a pool that has to be created. Raises NotFound when Serve
    does not run; InvalidRequest, before any change, when a pool is to grow and the cluster has no
    room for it (replicas that leave another pool make room), or the configuration no device."""
    if targets.get(Pool.PREFILL):
        check_devices(config)
    if not config.ray.autoscaling:
        _check_room(config, targets)
    for pool, replicas in targets.items():
        if set_replicas(pool, replicas) or replicas == 0 or pool is Pool.ROUTER:
            continue
        _run(config, [_target(application(config, pool, replicas=replicas), pool)])


def _check_room(config: ClusterConfig, targets: Mapping[Pool, int]) -> None:
    sizes = {pool: status.target or 0 for pool, status in pool_statuses().items()}
    # Shrinking needs no room; a cluster that lost a machine may have less than it runs.
    if any(replicas > sizes.get(pool, 0) for pool, replicas in targets.items()):
        sizes |= targets
        demands = [replace(d, replicas=sizes.get(Pool(d.pool), 0)) for d in demands_of(config)]
        check_resources(demands, nodes())


def nodes(*, free: bool = False) -> list[Node]:
    """The resources of each node, or with `free` those that are unused now."""
    available, found = call_with_timeout(
        ANSWER_S,
        "Ray did not say which nodes it has",
        lambda: (available_resources_per_node() if free else {}, ray.nodes()),
    )
    return [
        Node(
            resources=dict(available.get(node["NodeID"], {}) if free else node["Resources"]),
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

    timeout_s = config.lifecycle.start_timeout_s
    call_with_timeout(timeout_s, "Ray Serve did not take the applications", run)


def application(
    config: ClusterConfig, pool: Pool, *, replicas: int | None = None, spare: bool = True
) -> Any:
    """The application of a pool, with `replicas` in place of the configured number."""
    section = config.router if pool is Pool.ROUTER else config.pool(Role(pool))
    revision = describe_pool(config, pool).revision(pool)
    num_replicas = section.replicas if replicas is None else replicas
    if pool is Pool.ROUTER:
        options = _options(config, section.placement, section.placement.env, ranks=1)
        deployment = serve.deployment(RouterReplica, name=pool.value)
        arguments: tuple[Any, ...] = (config, revision, scale)
    else:
        workers = config.pool(Role(pool))
        ranks = workers.engine.tp_size
        options = _options(config, workers.placement, process_env(workers), ranks=ranks)
        deployment = serve.deployment(WorkerReplica, name=pool.value)
        arguments = (Role(pool), config, revision)
    options["max_surge_percent"] = _ONE_MORE if spare else 0
    return deployment.options(num_replicas=num_replicas, **options).bind(*arguments)


def _options(
    config: ClusterConfig, placement: PlacementSection, env: Mapping[str, str], *, ranks: int
) -> dict[str, Any]:
    """Serve's options of a deployment, whose replicas have one bundle per rank, all on one node."""
    times = config.lifecycle
    options: dict[str, Any] = {
        "ray_actor_options": {
            "num_cpus": placement.cpus,
            "num_gpus": placement.gpus,
            "runtime_env": runtime_env(env),
        },
        "placement_group_bundles": [placement.bundle() for _ in range(ranks)],
        "placement_group_strategy": "STRICT_PACK",
        # Only Serve's own checks call the replicas through Serve.
        "max_ongoing_requests": 100,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": times.drain_s + _GRACE_S,
        "health_check_period_s": times.health_period_s,
        "health_check_timeout_s": times.health_timeout_s,
        "max_constructor_retry_count": _CONSTRUCTOR_TRIES,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
    }
    if placement.labels:
        options["placement_group_bundle_label_selector"] = [dict(placement.labels)] * ranks
    return options


def _target(application: Any, pool: Pool) -> RunTarget:
    return RunTarget(
        target=application, name=pool.value, route_prefix=None, external_scaler_enabled=True
    )
