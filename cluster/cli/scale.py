"""`baton scale`: change the size of a pool of the live cluster."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from cluster.cli import session
from cluster.cli.console import Console
from cluster.config.checks import check_ports
from cluster.membership.table import MemberKind
from protocol.errors import InvalidRequest

_WAIT_S = 600.0


def run(options: argparse.Namespace, console: Console) -> None:
    """Set the wanted sizes; wait until newcomers serve and leavers are gone."""
    given = {
        MemberKind.PREFILL: options.prefill,
        MemberKind.DECODE: options.decode,
        MemberKind.ROUTER: options.router,
    }
    wanted = {kind: count for kind, count in given.items() if count is not None}
    if not wanted:
        raise InvalidRequest(
            "say which pool: --prefill N, --decode M or --router R", param="--prefill"
        )
    for kind in (MemberKind.DECODE, MemberKind.ROUTER):
        if wanted.get(kind) == 0:
            raise InvalidRequest(f"--{kind} must be at least 1", param=f"--{kind}")
    with session.connected() as directory:
        from cluster.cli.waiting import wait_for
        from cluster.serve.deployments import scale

        session.quiet_serve()
        (config,) = session.ask(directory.config.remote())
        if MemberKind.ROUTER in wanted:
            routers = replace(config.router, replicas=wanted[MemberKind.ROUTER])
            check_ports(replace(config, router=routers))
        scale(config, wanted)
        if not options.no_wait:
            wait_for(wanted, console, deadline=time.monotonic() + _WAIT_S, exact=True)
