"""`baton up` while the cluster is up: say what a changed configuration, model or version changes,
then change it pool by pool, so that a worker is always there for every request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.cli import session
from cluster.cli.console import Console
from cluster.cli.waiting import wait_for
from cluster.config.checks import Demand, check_resources, demands_of
from cluster.config.load import find_config
from cluster.config.schema import ClusterConfig
from cluster.local.local_ray import RunningCluster, save_state
from cluster.membership.directory import find_directory, reconfigure
from cluster.membership.table import Pool, reachable
from cluster.serve.changes import Change, Deployed, PoolChange, plan_change
from cluster.serve.control import pool_statuses, set_replicas
from cluster.serve.deployments import describe_pool, nodes, record, recorded, redeploy
from protocol.errors import BatonError, InvalidRequest, Unavailable
from protocol.states import WorkerState

#: For the restarted directory to have the replicas' reports.
_REPORTS_S = 60.0


def change(
    state: RunningCluster, config: ClusterConfig, source: str, console: Console, *, dry_run: bool
) -> RunningCluster:
    """Change the running cluster to a configuration; its state then. Requests go on, and each pool
    keeps its size, if need be by one replica more for a while. dry_run: only say what would be
    done. The connected Ray is the cluster's. Raises InvalidRequest, before any change, for what
    cannot change while it serves."""
    session.quiet_serve()
    try:
        directory = find_directory()
    except ValueError as error:
        raise Unavailable("Ray runs, but no Baton cluster is on it: `baton down` first") from error
    secret, known, build, scalings = session.ask(
        directory.secret.remote(),
        directory.config.remote(),
        directory.build.remote(),
        directory.scaling.remote(),
    )
    sizes = {pool: status.target or 0 for pool, status in pool_statuses().items()}
    wanted = {pool: describe_pool(config, pool) for pool in Pool}
    plan = plan_change(recorded(secret), wanted, sizes)
    for line in plan.lines():
        console.say(line)
    unchanged = known == config and build == (wanted[Pool.ROUTER].build, build[1])
    if unchanged and not plan.lines():
        console.say("nothing to change")
    if dry_run or (unchanged and not plan.lines()):
        return state
    spare = {each.pool: has_room(config, each) for each in plan.pools if each.reasons}
    if not unchanged:
        _restart_directory(directory, secret, config)
    # Sizes hold still meanwhile.
    held = {each.role for each in scalings if not each.pinned} & set(config.autoscaled)
    session.ask(directory.pin.remote(held, True))
    try:
        _replace_pools(plan, config, wanted, spare, secret, console)
    finally:
        session.ask(directory.pin.remote(held, False))
    (view,) = session.ask(directory.view.remote())
    router = view.of(Pool.ROUTER, WorkerState.READY)[0]
    changed = replace(
        state,
        config=str(find_config(source).absolute()),
        http=reachable(router.http, router.node),
        grpc=reachable(router.grpc, router.node),
    )
    save_state(changed)
    return changed


def _restart_directory(directory: Any, secret: bytes, config: ClusterConfig) -> None:
    """Give the directory the configuration; wait until as many replicas as before have reported."""
    (before,) = session.ask(directory.view.remote())
    reconfigure(directory, secret, config)
    limit = time.monotonic() + _REPORTS_S
    incarnation = version = -1
    while time.monotonic() < limit:
        watch = directory.watch.remote(incarnation, version, 1.0)
        (view,) = session.ask(watch, timeout_s=_REPORTS_S)
        if view.incarnation != before.incarnation and len(view.replicas) >= len(before.replicas):
            return
        incarnation, version = view.incarnation, view.version


def _replace_pools(
    plan: Change,
    config: ClusterConfig,
    wanted: Mapping[Pool, Deployed],
    spare: Mapping[Pool, bool],
    secret: bytes,
    console: Console,
) -> None:
    for each in plan.pools:
        pool = each.pool
        if each.reasons or (each.replicas and not each.before):
            redeploy(
                config, pool, replicas=each.replicas, spare=spare.get(pool, True), secret=secret
            )
        elif each.replicas != each.before:
            set_replicas(pool, each.replicas)
        if each.reasons or each.replicas != each.before:
            _wait_for_pool(each, wanted[pool].revision(pool), config, console)
        record(secret, pool, wanted[pool])


def _wait_for_pool(
    each: PoolChange, revision: str, config: ClusterConfig, console: Console
) -> None:
    deadline = time.monotonic() + config.lifecycle.start_timeout_s + config.lifecycle.drain_s
    targets, revisions = {each.pool: each.replicas}, {each.pool: revision}
    try:
        wait_for(targets, console, deadline=deadline, exact=True, revisions=revisions)
    except BatonError as error:
        raise type(error)(
            f"{error.message}\nreplicas that were there before go on; `baton up` with the former "
            "configuration takes the change back",
            param=error.param,
        ) from error


def has_room(config: ClusterConfig, each: PoolChange) -> bool:
    """Whether one replica more fits, for the time of the change. Without, a replica stops before
    the next one starts: decode computes prompts itself while prefill has none. Raises
    InvalidRequest when that would leave nothing."""
    if config.ray.autoscaling or not each.before:
        return True
    (demand,) = (d for d in demands_of(config) if d.pool == each.pool)
    one = Demand(pool=demand.pool, replicas=1, bundles=demand.bundles, labels=demand.labels)
    try:
        check_resources([one], nodes(free=True))
    except InvalidRequest as error:
        if each.before > 1 or each.pool is Pool.PREFILL:
            return False
        raise InvalidRequest(
            f"{each.pool} has one replica, and there is no room for its successor beside it: make "
            f"room, or `baton down` and `baton up`. {error.message}",
            param=f"{each.pool}.replicas",
        ) from error
    return True
