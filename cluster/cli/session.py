"""The command line's connection to the running cluster."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

from cluster.call_timeout import ANSWER_S, within
from cluster.local.local_ray import RunningCluster, load_state, lost_daemons, ray_environment
from protocol.errors import Unavailable

_REACH_S = 5.0
_ANSWER_S = 10.0
_LEAVE_S = 10.0
_NO_CLUSTER = "no cluster is up here: start one with `baton up CONFIG`"


def running() -> RunningCluster:
    """The cluster brought up on this machine. Raises Unavailable without one."""
    state = load_state()
    if state is None:
        raise Unavailable(_NO_CLUSTER)
    return state


def _reachable() -> RunningCluster:
    """That one, or what others deployed on the Ray that RAY_ADDRESS names, as it does in every pod
    of KubeRay. Raises Unavailable without either."""
    address = os.environ.get("RAY_ADDRESS")
    if load_state() is None and address:
        return RunningCluster(address=address, token="", config="")
    return running()


def prepare(state: RunningCluster) -> None:
    """Set what Ray reads from the environment while it is imported. Call before that."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if state.token:
        os.environ.update(ray_environment(state.token))


def connect(state: RunningCluster) -> None:
    """Connect this process to the cluster's Ray, once. Raises Unavailable without an answer."""
    if not state.address:
        raise Unavailable("the cluster is still starting, or its start was cut off: `baton down`")
    if lost := lost_daemons(state):
        raise Unavailable(
            f"{' and '.join(lost)} of its Ray died or is stopped: `baton down` ends the rest"
        )
    prepare(state)
    import ray

    if ray.is_initialized():
        return

    def join() -> None:
        ray.init(
            address=state.address,
            namespace="baton-cli",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    host, colon, port = state.address.rpartition(":")
    asked_to_stop = signal.getsignal(signal.SIGTERM)
    try:
        if colon:  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=_REACH_S).close()
        # Ray prints what it thinks of the cluster; the command has its own words.
        with contextlib.redirect_stderr(io.StringIO()):
            within(ANSWER_S, f"the Ray cluster at {state.address} did not answer", join)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unavailable(
            f"the Ray cluster at {state.address} does not answer: {reason}"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, asked_to_stop)  # which Ray takes for a crash


def ask(*calls: Any, timeout_s: float = _ANSWER_S) -> list[Any]:
    """What the directory answers to calls. Raises Unavailable when it does not."""
    import ray
    from ray.exceptions import RayError

    try:
        answers: list[Any] = ray.get(list(calls), timeout=timeout_s)
    except RayError as error:
        raise Unavailable(f"the directory does not answer: {type(error).__name__}") from error
    return answers


def quiet_serve() -> None:
    """Keep Serve's own progress lines off our output. Call once it has been imported."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def disconnect() -> None:
    """Leave the cluster's Ray."""
    import ray

    asked_to_stop = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(Unavailable):
        within(_LEAVE_S, "Ray did not let go", ray.shutdown)
    signal.signal(signal.SIGTERM, asked_to_stop)  # which Ray sets back to what kills


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """The directory of the cluster within reach. From here on this process runs below the priority
    of those that serve: it may share their machine, and imports Ray, which takes seconds."""
    state = _reachable()
    os.nice(10)
    connect(state)
    from cluster.membership.directory import find_directory

    try:
        try:
            directory = find_directory()
        except ValueError as error:
            raise Unavailable("Ray runs, but no Baton cluster is on it") from error
        yield directory
    finally:
        disconnect()
