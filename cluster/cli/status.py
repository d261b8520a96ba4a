"""`baton status`: pools, workers, KV blocks and load."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from cluster.cli import session
from cluster.cli.console import Console
from cluster.membership.table import Pool, Replica, View
from protocol.errors import BatonError
from protocol.messages import StatusQuery, WorkerStatus
from rpc.client import ControlClient
from rpc.methods import STATUS

_CALL_S = 5.0


def run(_options: argparse.Namespace, console: Console) -> None:
    """Show the running cluster."""
    with session.connected() as directory:
        view, secret = session.ask(directory.view.remote(), directory.secret.remote())
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
    show_replicas(view, secret, console)


def show_replicas(view: View, secret: bytes, console: Console) -> None:
    """One line for each replica; each worker is asked for its load."""
    workers = view.workers()
    statuses = asyncio.run(_load_of(workers, secret))
    rows = [_worker_row(w, s) for w, s in zip(workers, statuses, strict=True)]
    header = ("WORKER", "STATE", "RUNNING", "WAITING", "KV FREE", "HELD", "CACHED", "QUARANTINED")
    console.table((*header, "TOTAL", "STEPS", "ADDRESS"), rows)
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
        return (worker.name, "no answer", *("-",) * 8, worker.address)
    load = status.load
    return (
        worker.name,
        status.state.value,
        load.running,
        load.waiting,
        load.idle_blocks,
        load.held_blocks,
        load.cached_blocks,
        load.quarantined_blocks,
        load.total_blocks,
        status.steps,
        worker.address,
    )
