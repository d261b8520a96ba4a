"""`baton status`: pools, workers, KV blocks and load."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from cluster.cli import session
from cluster.cli.console import Console
from cluster.membership.table import Member, MemberKind, View
from protocol.errors import BatonError
from protocol.messages import StatusQuery, WorkerStatus
from rpc.methods import STATUS
from rpc.service import ControlClient

_CALL_S = 5.0


def run(_options: argparse.Namespace, console: Console) -> None:
    """Show the running cluster."""
    with session.connected() as directory:
        view, secret = session.ask(directory.view.remote(), directory.secret.remote())
        from cluster.serve.control import pool_statuses

        pools = pool_statuses()
    rows = []
    for kind in MemberKind:
        status = pools.get(kind)
        states = (
            ", ".join(f"{count} {state.lower()}" for state, count in status.replicas.items())
            if status
            else ""
        )
        rows.append((kind.value, (status and status.target) or 0, len(view.of(kind)), states))
    console.table(("POOL", "WANTED", "MEMBERS", "REPLICAS"), rows)
    console.say()
    show_members(view, secret, console)


def show_members(view: View, secret: bytes, console: Console) -> None:
    """One line for each member, workers asked for their load directly."""
    workers = [member for member in view.members if member.kind is not MemberKind.ROUTER]
    statuses = asyncio.run(_ask_all(workers, secret))
    rows = [_worker_row(m, s) for m, s in zip(workers, statuses, strict=True)]
    header = ("WORKER", "STATE", "RUNNING", "WAITING", "KV FREE", "HELD", "CACHED", "QUARANTINED")
    console.table((*header, "TOTAL", "STEPS", "ADDRESS"), rows)
    routers = [
        (m.name, m.state.value, m.http, m.grpc, m.metrics) for m in view.of(MemberKind.ROUTER)
    ]
    console.say()
    console.table(("ROUTER", "STATE", "HTTP", "GRPC", "METRICS"), routers)


async def _ask_all(workers: Sequence[Member], secret: bytes) -> list[WorkerStatus | None]:
    return list(await asyncio.gather(*(_ask(member, secret) for member in workers)))


async def _ask(member: Member, secret: bytes) -> WorkerStatus | None:
    client = ControlClient(member.address, secret=secret)
    try:
        return await client.call(STATUS, StatusQuery(), timeout_s=_CALL_S)
    except BatonError:
        return None
    finally:
        await client.close()


def _worker_row(member: Member, status: WorkerStatus | None) -> tuple[object, ...]:
    if status is None:
        return (member.name, "no answer", *("-",) * 8, member.address)
    load = status.load
    return (
        member.name,
        status.state.value,
        load.running,
        load.waiting,
        load.idle_blocks,
        load.held_blocks,
        load.cached_blocks,
        load.quarantined_blocks,
        load.total_blocks,
        status.steps,
        member.address,
    )
