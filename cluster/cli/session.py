"""The connection of a command to the running cluster's Ray and directory."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

from cluster.call_timeout import ANSWER_S, call_with_timeout
from cluster.local.local_ray import RunningCluster, load_state, lost_daemons, ray_environment
from protocol.errors import Unavailable

_CONNECT_S = 5.0
_DIRECTORY_S = 10.0
_SHUTDOWN_S = 10.0


def running() -> RunningCluster:
    """The cluster that `baton up` started here. Raises Unavailable without one."""
    state = load_state()
    if state is None:
        raise Unavailable("no cluster is up here: start one with `baton up CONFIG`")
    return state


def _running_or_ray_address() -> RunningCluster:
    """The cluster started here, else the one on the Ray that RAY_ADDRESS names, which is set in
    every pod of KubeRay. Raises Unavailable without either."""
    address = os.environ.get("RAY_ADDRESS")
    if load_state() is None and address:
        return RunningCluster(address=address, token="", config="")
    return running()


def prepare(state: RunningCluster) -> None:
    """Set the variables that Ray reads at import. Call before importing it."""
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

    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    init = partial(ray.init, state.address, namespace="baton-cli", **options)
    host, colon, port = state.address.rpartition(":")
    try:
        if colon:  # fails at once where Ray would retry for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        # Ray reports connection problems on standard error; the command reports its own.
        with _sigterm_handler_kept(), contextlib.redirect_stderr(io.StringIO()):
            call_with_timeout(ANSWER_S, f"the Ray cluster at {state.address} did not answer", init)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unavailable(
            f"the Ray cluster at {state.address} does not answer: {reason}"
        ) from error


def serves(address: str) -> bool:
    """Whether a Baton cluster runs on the Ray at this address, by whatever means it came there."""
    from cluster.membership.directory import find_directory

    connect(RunningCluster(address=address, token="", config=""))
    try:
        find_directory()
    except ValueError:
        return False
    return True


def ask(*calls: Any, timeout_s: float = _DIRECTORY_S) -> list[Any]:
    """The results of calls to the directory. Raises Unavailable when it does not answer, and what
    it raised itself."""
    import ray

    from cluster.membership.store import ray_errors_as_unavailable

    with ray_errors_as_unavailable("the directory"):
        answers: list[Any] = ray.get(list(calls), timeout=timeout_s)
    return answers


def quiet_serve() -> None:
    """Hide Serve's progress messages. Call after importing it."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def disconnect() -> None:
    import ray

    with _sigterm_handler_kept(), contextlib.suppress(Unavailable):
        call_with_timeout(_SHUTDOWN_S, "Ray did not disconnect", ray.shutdown)


@contextlib.contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Restore SIGTERM's handler: `ray.init` and `ray.shutdown` replace it."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """The directory of the cluster. Lowers this process's priority: importing Ray takes seconds of
    CPU, perhaps on a machine that serves."""
    state = _running_or_ray_address()
    os.nice(10)
    connect(state)
    from cluster.membership.directory import find_directory

    try:
        try:
            directory = find_directory()
        except ValueError as error:
            raise Unavailable("Ray runs, but no Baton cluster is on it") from error
        _check_version(directory)
        yield directory
    finally:
        disconnect()


def _check_version(directory: Any) -> None:
    """Raise Unavailable unless this command understands the cluster's messages."""
    from cluster.membership.table import cluster_protocol
    from router.fingerprint import baton_build

    ((build, protocol),) = ask(directory.build.remote())
    if protocol != cluster_protocol():
        raise Unavailable(
            f"the cluster runs Baton {build} and this command is of {baton_build()}: their "
            "messages differ. Use a command of the cluster's version"
        )
