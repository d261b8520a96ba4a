"""`baton down`: drain the cluster, then end all of its processes."""

from __future__ import annotations

import argparse

from cluster.call_timeout import ANSWER_S, call_with_timeout
from cluster.cli import session
from cluster.cli.console import Console
from cluster.config.schema import LifecycleSection
from cluster.local.local_ray import RunningCluster, clean_up_dead, forget_state, stop_local_ray
from protocol.errors import BatonError, Unavailable

#: Time to end replicas, beyond the time that their requests have.
_GRACE_S = 30.0


def run(options: argparse.Namespace, console: Console) -> None:
    """Stop the cluster that was started here."""
    if clean_up_dead():
        console.step("the cluster had died; its remains are removed")
        return
    take_down(session.running(), console, now=options.now)
    console.step("the cluster is down")


def take_down(state: RunningCluster, console: Console, *, now: bool) -> None:
    """Drain unless `now`, then end Baton on this Ray, and the Ray itself if Baton owns it. A
    cluster without an address has not served yet."""
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
            console.warn(f"{killed} process(es) did not end in time and were killed")
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
            call_with_timeout(
                ANSWER_S, "Ray did not end the directory", lambda: ray.kill(directory)
            )
    finally:
        session.disconnect()
