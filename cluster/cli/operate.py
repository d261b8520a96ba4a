"""`baton status`, `scale`, `role` and `drain`: view and change the live cluster."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from cluster.cli import session
from cluster.cli.arguments import AUTOMATIC
from cluster.cli.console import Console
from cluster.config.checks import GIB, check_ports
from cluster.membership.table import Pool, Replica, View
from cluster.scaling.autoscaler import PoolScaling, RoleState
from protocol.errors import BatonError, InvalidRequest
from protocol.ids import Role
from protocol.messages import StatusQuery, WorkerStatus
from rpc.client import ControlClient
from rpc.methods import STATUS

_WAIT_S = 600.0
_CALL_S = 5.0


def run(options: argparse.Namespace, console: Console) -> None:
    if options.command == "status":
        _status(console)
    elif options.command == "drain":
        _drain(options.worker, console)
    elif options.command == "role":
        _role(options.worker, Role(options.role), console)
    else:
        _scale(options, console)


def _status(console: Console) -> None:
    with session.connected() as directory:
        calls = directory.view.remote(), directory.secret.remote(), directory.scaling.remote()
        view, secret, scalings, roles = session.ask(*calls, directory.roles.remote())
        from cluster.serve.control import pool_statuses

        statuses = pool_statuses()
    rows = []
    for pool in Pool:
        target, states = 0, ""
        if status := statuses.get(pool):
            target = status.target or 0
            states = ", ".join(
                f"{count} {state.lower()}" for state, count in status.replicas.items()
            )
        rows.append((pool.value, target, len(view.of(pool)), states))
    console.table(("POOL", "WANTED", "REPORTING", "REPLICAS"), rows)
    console.say()
    if scalings:
        _show_scaling(scalings, console)
    if roles is not None:
        _show_roles(roles, console)
    show_replicas(view, secret, console)


def _show_scaling(scalings: Sequence[PoolScaling], console: Console) -> None:
    """One line for each autoscaled pool: its bounds, what its load takes, and why it has its
    size."""
    rows = []
    for scaling in scalings:
        bounds = f"{scaling.least} to {scaling.most}"
        changed = "none yet"
        if scaling.changed_s is not None:
            changed = f"{scaling.change} ({scaling.changed_s:.0f} s ago)"
        size = f"{scaling.wanted} (pinned)" if scaling.pinned else scaling.wanted
        rows.append((scaling.role, size, bounds, f"{scaling.need:.2f}", scaling.reason, changed))
    console.table(("AUTOSCALED", "SIZE", "BOUNDS", "NEED", "LOAD", "LAST CHANGE"), rows)
    console.say()


def _show_roles(roles: RoleState, console: Console) -> None:
    """One line for each role: workers that have it, those that the load takes, and why."""
    changed = "none yet"
    if roles.change is not None:
        change = roles.change
        changed = f"{change.worker_id} to {change.role} ({roles.changed_s:.0f} s ago)"
    view = roles.view
    rows = [
        (role, view.workers[role], f"{view.need[role]:.2f}", view.reason, changed) for role in Role
    ]
    console.table(("ROLE", "WORKERS", "NEED", "SPLIT", "LAST CHANGE"), rows)
    if roles.change is not None:
        console.say(f"because {roles.change.reason}")
    console.say()


def show_replicas(view: View, secret: bytes, console: Console) -> None:
    """One line for each replica; each worker is asked for its load."""
    workers = view.workers()
    statuses = asyncio.run(_load_of(workers, secret))
    rows = [_worker_row(w, s) for w, s in zip(workers, statuses, strict=True)]
    header = ("WORKER", "ROLE", "STATE", "RUNNING", "WAITING", "KV FREE", "HELD", "CACHED")
    figures = ("QUARANTINED", "TOTAL", "HOST", "DISK", "STEPS", "WEIGHTS", "ADDRESS")
    console.table((*header, *figures), rows)
    console.say()
    routers = [(r.name, r.state.value, r.http, r.grpc, r.metrics) for r in view.of(Pool.ROUTER)]
    console.table(("ROUTER", "STATE", "HTTP", "GRPC", "METRICS"), routers)


async def _load_of(workers: Sequence[Replica], secret: bytes) -> list[WorkerStatus | None]:
    async def ask(worker: Replica) -> WorkerStatus | None:
        client = ControlClient(worker.address, secret=secret)
        try:
            return await client.call(STATUS, StatusQuery(), timeout_s=_CALL_S)
        except BatonError:
            return None
        finally:
            await client.close()

    return await asyncio.gather(*map(ask, workers))


def _worker_row(worker: Replica, status: WorkerStatus | None) -> tuple[object, ...]:
    if status is None:
        return (worker.name, worker.ref().role, "no answer", *("-",) * 11, worker.address)
    load = status.load
    return (
        worker.name,
        status.role.value,
        status.state.value,
        load.running,
        load.waiting,
        load.idle_blocks,
        load.held_blocks,
        load.cached_blocks,
        load.quarantined_blocks,
        load.total_blocks,
        *(_tier(status, tier) for tier in ("host", "disk")),
        status.steps,
        status.precision,
        worker.address,
    )


def _tier(status: WorkerStatus, name: str) -> str:
    """Used and size of a KV tier below the pool."""
    for tier in status.tiers:
        if tier.tier == name:
            unit, scale = ("GiB", GIB) if tier.total_bytes * 10 > GIB else ("MiB", 1 << 20)
            return f"{tier.used_bytes / scale:.1f}/{tier.total_bytes / scale:.1f} {unit}"
    return "-"


def _scale(options: argparse.Namespace, console: Console) -> None:
    """Set the pools' sizes; wait until new replicas are ready and surplus ones are gone."""
    given = {pool: getattr(options, pool) for pool in Pool}
    automatic = frozenset(Role(pool) for pool, count in given.items() if count == AUTOMATIC)
    targets = {pool: count for pool, count in given.items() if isinstance(count, int)}
    if not targets and not automatic:
        raise InvalidRequest(
            "name a pool: --prefill N, --decode M or --router R", param="--prefill"
        )
    for pool in (Pool.DECODE, Pool.ROUTER):
        if targets.get(pool) == 0:
            raise InvalidRequest(f"--{pool} must be at least 1", param=f"--{pool}")
    with session.connected() as directory:
        from cluster.cli.waiting import wait_for
        from cluster.serve.deployments import scale

        session.quiet_serve()
        (config,) = session.ask(directory.config.remote())
        if automatic:
            session.ask(directory.pin.remote(automatic, False))
        pinned = frozenset(Role(pool) for pool in targets if pool is not Pool.ROUTER)
        if Pool.ROUTER in targets:
            routers = replace(config.router, replicas=targets[Pool.ROUTER])
            check_ports(replace(config, router=routers))
        held = session.ask(directory.pin.remote(pinned, True))[0] if pinned else pinned
        try:
            scale(config, targets)
        except InvalidRequest:  # before any change
            session.ask(directory.pin.remote(held, False))
            raise
        if targets and not options.no_wait:
            wait_for(targets, console, deadline=time.monotonic() + _WAIT_S, exact=True)


def _role(worker_id: str, role: Role, console: Console) -> None:
    with session.connected() as directory:
        view, secret = session.ask(directory.view.remote(), directory.secret.remote())
        from cluster.serve.admin import set_role

        worker = asyncio.run(set_role(view, worker_id, role, secret=secret))
    begun = "what it decodes moves away" if role is Role.PREFILL else "it ends its prompts"
    console.say(f"{worker.name} takes the work of {role} now; {begun}")


def _drain(worker_id: str, console: Console) -> None:
    with session.connected() as directory:
        view, secret = session.ask(directory.view.remote(), directory.secret.remote())
        from cluster.serve.admin import drain_worker

        worker = asyncio.run(drain_worker(view, worker_id, secret=secret))
    console.say(f"{worker.name} is {worker.state}; it is replaced once its requests have ended")
