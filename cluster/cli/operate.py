"""`baton scale` and `baton drain`: change the live cluster."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace

from cluster.cli import session
from cluster.cli.console import Console
from cluster.config.checks import check_ports
from cluster.membership.table import Pool
from protocol.errors import InvalidRequest

_WAIT_S = 600.0


def run(options: argparse.Namespace, console: Console) -> None:
    """Scale pools, or drain one worker."""
    if options.command == "drain":
        _drain(options.worker, console)
    else:
        _scale(options, console)


def _scale(options: argparse.Namespace, console: Console) -> None:
    """Set the pools' sizes; wait until new replicas are ready and surplus ones are gone."""
    given = {pool: getattr(options, pool) for pool in Pool}
    targets = {pool: count for pool, count in given.items() if count is not None}
    if not targets:
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
        if Pool.ROUTER in targets:
            routers = replace(config.router, replicas=targets[Pool.ROUTER])
            check_ports(replace(config, router=routers))
        scale(config, targets)
        if not options.no_wait:
            wait_for(targets, console, deadline=time.monotonic() + _WAIT_S, exact=True)


def _drain(worker_id: str, console: Console) -> None:
    """Let one worker finish its requests; Serve then replaces it."""
    with session.connected() as directory:
        view, secret = session.ask(directory.view.remote(), directory.secret.remote())
        from cluster.serve.admin import drain_worker

        worker = asyncio.run(drain_worker(view, worker_id, secret=secret))
    console.say(f"{worker.name} is {worker.state}; it is replaced once its requests have ended")
