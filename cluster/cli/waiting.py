"""Waits until the pools have the wanted numbers of replicas, and shows progress."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from cluster.cli import session
from cluster.cli.console import Console
from cluster.config.schema import ClusterConfig
from cluster.membership.directory import find_directory
from cluster.membership.table import Pool, Replica, View
from cluster.serve.control import PoolStatus, pool_statuses
from protocol.errors import Internal, Unavailable
from protocol.states import WorkerState

_WATCH_S = 1.0


def wait_ready(config: ClusterConfig, console: Console, *, deadline: float) -> Replica:
    """Return a ready router once every pool has the replicas of the configuration."""
    targets = {
        Pool.PREFILL: config.prefill.replicas,
        Pool.DECODE: config.decode.replicas,
        Pool.ROUTER: config.router.replicas,
    }
    view = wait_for(targets, console, deadline=deadline, exact=False)
    return view.of(Pool.ROUTER, WorkerState.READY)[0]


def wait_for(
    targets: Mapping[Pool, int],
    console: Console,
    *,
    deadline: float,
    exact: bool,
    revisions: Mapping[Pool, str] | None = None,
) -> View:
    """Wait until each pool has that many ready replicas (with `exact`: and no others), of its
    revision if that is given. A pool of a revision that it had before a change is replaced, too:
    until Serve has ended that, what is ready may be what is to go.

    Raises Internal with Serve's reason when a pool cannot start; Unavailable at the deadline, or
    when another command changes a pool's size.
    """
    directory = find_directory()
    incarnation = version = -1
    shown = ""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        watch = directory.watch.remote(incarnation, version, _WATCH_S)
        view: View = session.ask(watch, timeout_s=left_s + 2 * _WATCH_S)[0]
        incarnation, version = view.incarnation, view.version
        line = _progress(view, targets, revisions or {})
        if line != shown:
            shown = line
            console.step(line)
        statuses = {pool: each for pool, each in pool_statuses().items() if pool in targets}
        settled = not revisions or all(status.healthy for status in statuses.values())
        if settled and _reached(view, targets, exact=exact, revisions=revisions or {}):
            return view
        _raise_failed(statuses)
        _raise_resized(statuses, targets)
        if time.monotonic() > deadline:
            raise Unavailable(f"not ready in time: {line}. {_reasons(statuses)}".strip())


def _ready(view: View, pool: Pool, revisions: Mapping[Pool, str]) -> int:
    ready = view.of(pool, WorkerState.READY)
    return sum(revisions.get(pool, replica.revision) == replica.revision for replica in ready)


def _progress(view: View, targets: Mapping[Pool, int], revisions: Mapping[Pool, str]) -> str:
    parts = []
    for pool, count in targets.items():
        draining = len(view.of(pool, WorkerState.DRAINING))
        more = f" ({draining} draining)" if draining else ""
        parts.append(f"{pool} {_ready(view, pool, revisions)}/{count}{more}")
    return ", ".join(parts) + " ready"


def _reached(
    view: View, targets: Mapping[Pool, int], *, exact: bool, revisions: Mapping[Pool, str]
) -> bool:
    return all(
        _ready(view, pool, revisions) >= count and (not exact or len(view.of(pool)) == count)
        for pool, count in targets.items()
    )


def _raise_failed(statuses: Mapping[Pool, PoolStatus]) -> None:
    for pool, status in statuses.items():
        if status.failed:
            raise Internal(f"the {pool} pool cannot start: {_last_line(status.message)}")


def _raise_resized(statuses: Mapping[Pool, PoolStatus], targets: Mapping[Pool, int]) -> None:
    for pool, count in targets.items():
        target = statuses[pool].target if pool in statuses else None
        if target not in (None, count):
            raise Unavailable(f"the {pool} pool was scaled to {target} meanwhile")


def _reasons(statuses: Mapping[Pool, PoolStatus]) -> str:
    return "; ".join(
        f"{pool}: {_last_line(status.message)}"
        for pool, status in statuses.items()
        if not status.healthy and status.message
    )


def _last_line(text: str) -> str:
    """The error line of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^protocol\.errors\.\w+: ", "", lines[-1]) if lines else "no reason given"
