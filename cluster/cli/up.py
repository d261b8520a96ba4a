"""`baton up`: start everything, wait until it serves, and leave it running."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from cluster.cli import down, session
from cluster.cli.console import Console
from cluster.config.checks import check_config, check_doors, check_resources, demands_of
from cluster.config.load import load_config
from cluster.config.schema import ClusterConfig
from cluster.local.local_ray import (
    RunningCluster,
    kept_logs,
    load_state,
    save_state,
    session_logs,
    spawn_local_ray,
    stop_local_ray,
    sweep,
    wait_local_ray,
)
from cluster.local.paths import file_lock, models_dir, run_dir
from cluster.membership.table import reachable
from cluster.models.store import find_model
from protocol.errors import InvalidRequest, Unavailable

_STOPPING = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.5


def run(options: argparse.Namespace, console: Console) -> None:
    """Bring the cluster up; with --foreground, hold it until interrupted."""
    config = read_config(options, console)
    state = bring_up(config, options.config, console)
    if not options.foreground:
        show_endpoints(state, config, console)
        return
    asked = threading.Event()  # of several signals, whichever threads they meet, the first counts
    _on_stopping(lambda *_: asked.set())
    try:
        show_endpoints(state, config, console)
        console.step("running; Ctrl-C stops the cluster")
        asked.wait()
    finally:
        stop(state, console, now=False)


def read_config(options: argparse.Namespace, console: Console) -> ClusterConfig:
    """The configuration named on the command line, checked against the model."""
    loaded = load_config(options.config, overrides=options.overrides, environ=os.environ)
    for warning in loaded.warnings:
        console.warn(warning)
    config, model = loaded.config, find_model(loaded.config.model.name)
    check_config(config, model)
    if model.is_relative_to(models_dir()):
        return config
    # A path is whole from here on: replicas run in another directory.
    return replace(config, model=replace(config.model, name=str(model)))


def bring_up(config: ClusterConfig, source: str, console: Console) -> RunningCluster:
    """Start the cluster and wait until it serves. On failure, Ctrl-C or SIGTERM nothing of it is
    left."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to be asked to stop is Ctrl-C, too
    state = None
    try:
        with file_lock(run_dir() / "up.lock"):  # of two commands at once, one starts
            existing = load_state()
            if existing is not None:
                raise InvalidRequest(
                    f"a cluster is up already ({existing.config}): `baton down` first"
                )
            sweep()
            # Between a Ray of our own and our knowledge of it there is no moment to stop at.
            with _uninterrupted() if config.ray.local else contextlib.nullcontext():
                state = _claim(config, source)
        state = _reach_ray(state, console)
        with _leaving_with(state, console):
            state = _start(config, state, console)
        save_state(state)
    except BaseException:
        if state is not None:
            console.step("stopping what was started")
            stop(state, console, now=True)
            if state.owned:
                console.step(f"logs: {kept_logs()}")
        raise
    return state


def stop(state: RunningCluster, console: Console, *, now: bool) -> None:
    """Take down what this command started. Ctrl-C or SIGTERM cuts only the wait for running
    requests short, so that no process is left behind."""
    before = {number: signal.getsignal(number) for number in _STOPPING}
    try:
        _on_stopping(_ignore if now else _interrupt_once)
        down.take_down(state, console, now=now)
    except KeyboardInterrupt:
        console.step("stopping at once")
        down.take_down(state, console, now=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_stopping(handler: Callable[..., None]) -> None:
    for number in _STOPPING:
        signal.signal(number, handler)


def _ignore(*_: object) -> None:
    """A handler, since SIG_IGN would be passed on to processes that we start."""


def _interrupt_once(*_: object) -> None:
    _on_stopping(_ignore)  # nothing may interrupt what answers this interrupt
    raise KeyboardInterrupt


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM come when the block is over."""
    asked = threading.Event()
    before = {number: signal.getsignal(number) for number in _STOPPING}
    _on_stopping(lambda *_: asked.set())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if asked.is_set():
            raise KeyboardInterrupt


@contextlib.contextmanager
def _leaving_with(state: RunningCluster, console: Console) -> Iterator[None]:
    """End this process when the head does, by `baton down` elsewhere or by itself: nothing is left
    to stop then, and Ray's client would call for it in vain for a minute. After the block nobody
    looks any more, or a head that we stop ourselves would end us in the middle of that."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if not state.alive:
                console.error("the cluster was taken down meanwhile")
                os._exit(1)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def show_endpoints(state: RunningCluster, config: ClusterConfig, console: Console) -> None:
    """Where the cluster answers."""
    name = config.model.served_name or find_model(config.model.name).name
    scheme = "https" if config.router.settings.tls.enabled else "http"
    console.say(f"{name} is served at {scheme}://{state.http}/v1 (OpenAI) and {state.grpc} (gRPC)")
    if state.owned:
        console.step(f"logs: {session_logs(state)}")


def _claim(config: ClusterConfig, source: str) -> RunningCluster:
    """The Ray to use; one of our own starts, where `baton down` finds it even if we are killed."""
    path = str(Path(source).absolute())
    if not config.ray.local:
        state = RunningCluster(address=config.ray.address, token="", config=path)
        session.connect(state)
        _check_free(config)
        return state
    check_doors(config.network)
    spawned = spawn_local_ray(config.ray, path)
    try:
        save_state(spawned)
    except BaseException:
        stop_local_ray(spawned)
        raise
    return spawned


def _reach_ray(state: RunningCluster, console: Console) -> RunningCluster:
    if state.owned:
        session.prepare(state)
        import cluster.serve.deployments  # noqa: F401 - takes a second, in which Ray starts

        state = wait_local_ray(state)
        console.step("Ray is up")
    return state


def _start(config: ClusterConfig, state: RunningCluster, console: Console) -> RunningCluster:
    session.connect(state)
    from cluster.cli.waiting import wait_ready
    from cluster.membership.directory import create_directory
    from cluster.serve.deployments import deploy

    session.quiet_serve()
    if state.owned:
        _check_free(config)
    deadline = time.monotonic() + config.lifecycle.start_timeout_s
    create_directory(config)
    deploy(config)
    console.step("deployed; loading the model")
    router = wait_ready(config, console, deadline=deadline)
    session.disconnect()
    http, grpc = (reachable(door, router.node) for door in (router.http, router.grpc))
    return replace(state, http=http, grpc=grpc)


def _check_free(config: ClusterConfig) -> None:
    """Raise unless the Ray that we are connected to has no Baton on it, and room for ours. With a
    Ray of others this must come before anything that a failure would take down."""
    from cluster.membership.directory import NAME, NAMESPACE, find_directory
    from cluster.serve.deployments import nodes

    try:
        find_directory()
    except ValueError:
        if not config.ray.autoscaling:
            check_resources(demands_of(config), nodes(free=True))
    else:
        raise Unavailable(
            f"a Baton cluster runs on this Ray already (actor {NAME} in namespace {NAMESPACE})"
        )
