"""`baton down`: drain the cluster, then leave no process of it behind."""

from __future__ import annotations

import argparse

from cluster.call_timeout import ANSWER_S, within
from cluster.cli import session
from cluster.cli.console import Console
from cluster.config.schema import LifecycleSection
from cluster.local.local_ray import RunningCluster, forget_state, stop_local_ray, sweep
from protocol.errors import BatonError, Unavailable

#: What ending replicas may take beyond the time that their requests have.
_GRACE_S = 30.0


def run(options: argparse.Namespace, console: Console) -> None:
    """Stop the cluster that was brought up here."""
    if sweep():
        console.step("the cluster had died; what was left of it is gone")
        return
    take_down(session.running(), console, now=options.now)
    console.step("the cluster is down")


def take_down(state: RunningCluster, console: Console, *, now: bool) -> None:
    """Drain unless `now`, then end Baton on this Ray, and Ray itself if it is ours. A cluster that
    has no address yet serves nobody."""
    if state.address and not (now and state.owned):
        try:
            _drain(state, console)
        except BatonError as error:
            console.warn(error.message)
    elif state.address:
        session.disconnect()
    if state.owned:
        killed = stop_local_ray(state)
        if killed:
            console.warn(f"{killed} process(es) did not end by themselves and were killed")
    forget_state(state)


def _drain(state: RunningCluster, console: Console) -> None:
    session.connect(state)
    import ray

    from cluster.membership.directory import find_directory
    from cluster.serve.control import undeploy

    directory, drain_s = None, LifecycleSection().drain_s
    try:
        try:
            directory = find_directory()
            drain_s = session.ask(directory.config.remote())[0].lifecycle.drain_s
        except (ValueError, Unavailable):
            console.step("no directory answers")
        console.step(f"draining: running requests have {drain_s:.0f} s")
        try:
            undeploy(drain_s + _GRACE_S)
        except Unavailable as error:
            console.warn(error.message)
        if directory is not None:
            within(ANSWER_S, "Ray did not end the directory", lambda: ray.kill(directory))
    finally:
        session.disconnect()
