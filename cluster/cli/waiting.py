"""Waiting for the cluster to reach what was asked of it, with progress shown."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from cluster.cli import session
from cluster.cli.console import Console
from cluster.config.schema import ClusterConfig
from cluster.membership.directory import find_directory
from cluster.membership.table import Member, MemberKind, View
from cluster.serve.control import PoolStatus, pool_statuses
from protocol.errors import Internal, Unavailable
from protocol.states import WorkerState

_LOOK_S = 1.0


def wait_ready(config: ClusterConfig, console: Console, *, deadline: float) -> Member:
    """Return a ready router once every pool has the replicas that the configuration asks for."""
    wanted = {
        MemberKind.PREFILL: config.prefill.replicas,
        MemberKind.DECODE: config.decode.replicas,
        MemberKind.ROUTER: config.router.replicas,
    }
    view = wait_for(wanted, console, deadline=deadline, exact=False)
    return view.of(MemberKind.ROUTER, WorkerState.READY)[0]


def wait_for(
    wanted: Mapping[MemberKind, int], console: Console, *, deadline: float, exact: bool
) -> View:
    """Wait until so many members of each kind are ready (with `exact`: and no others are left).

    Raises Internal with Serve's reason when a pool cannot start, Unavailable when time runs out or
    somebody else has given a pool another size meanwhile.
    """
    directory = find_directory()
    incarnation = version = -1
    shown = ""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        watch = directory.watch.remote(incarnation, version, _LOOK_S)
        view: View = session.ask(watch, timeout_s=left_s + 2 * _LOOK_S)[0]
        incarnation, version = view.incarnation, view.version
        line = _progress(view, wanted)
        if line != shown:
            shown = line
            console.step(line)
        if _reached(view, wanted, exact):
            return view
        statuses = pool_statuses()
        _raise_failed(statuses)
        _raise_resized(statuses, wanted)
        if time.monotonic() > deadline:
            raise Unavailable(f"not ready in time: {line}. {_reasons(statuses)}".strip())


def _progress(view: View, wanted: Mapping[MemberKind, int]) -> str:
    parts = []
    for kind, count in wanted.items():
        ready = len(view.of(kind, WorkerState.READY))
        draining = len(view.of(kind, WorkerState.DRAINING))
        more = f" ({draining} draining)" if draining else ""
        parts.append(f"{kind} {ready}/{count}{more}")
    return ", ".join(parts) + " ready"


def _reached(view: View, wanted: Mapping[MemberKind, int], exact: bool) -> bool:
    for kind, count in wanted.items():
        ready = len(view.of(kind, WorkerState.READY))
        if ready < count or (exact and len(view.of(kind)) != count):
            return False
    return True


def _raise_failed(statuses: Mapping[MemberKind, PoolStatus]) -> None:
    for status in statuses.values():
        if status.failed:
            raise Internal(f"the {status.kind} pool cannot start: {_last_line(status.message)}")


def _raise_resized(
    statuses: Mapping[MemberKind, PoolStatus], wanted: Mapping[MemberKind, int]
) -> None:
    for kind, count in wanted.items():
        target = statuses[kind].target if kind in statuses else None
        if target not in (None, count):
            raise Unavailable(f"the {kind} pool was scaled to {target} meanwhile")


def _reasons(statuses: Mapping[MemberKind, PoolStatus]) -> str:
    return "; ".join(
        f"{kind}: {_last_line(status.message)}"
        for kind, status in statuses.items()
        if not status.healthy and status.message
    )


def _last_line(text: str) -> str:
    """The line of a traceback that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^protocol\.errors\.\w+: ", "", lines[-1]) if lines else "no reason given"
