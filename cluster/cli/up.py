"""`baton up`: start a cluster, wait until it serves, and leave it running. `baton down`: drain it,
then end all of its processes."""

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

from cluster.call_timeout import ANSWER_S, call_with_timeout
from cluster.cli import session
from cluster.cli.console import Console
from cluster.config.checks import (
    check_config,
    check_fields,
    check_folder,
    check_listening,
    check_resources,
    demands_of,
    warnings_of,
)
from cluster.config.load import find_config, load_config
from cluster.config.schema import ClusterConfig, LifecycleSection
from cluster.local.local_ray import (
    RunningCluster,
    clean_up_dead,
    forget_state,
    head_log,
    kept_logs,
    load_state,
    lost_daemons,
    save_state,
    session_logs,
    spawn_local_ray,
    stop_local_ray,
    wait_local_ray,
)
from cluster.local.paths import file_lock, models_dir, run_dir
from cluster.membership.table import reachable
from cluster.models.gguf import SOURCES
from cluster.models.store import find_model, get_model
from protocol.errors import BatonError, InvalidRequest, Unavailable
from protocol.ids import Role

_POLL_S = 0.5
_WATCH_S = 2.0
#: Time to end replicas, beyond the time that their requests have.
_GRACE_S = 30.0


def run(options: argparse.Namespace, console: Console) -> None:
    if options.command == "up":
        _up(options, console)
    elif clean_up_dead():
        console.step("the cluster had died; its remains are removed")
    else:
        take_down(session.running(), console, now=options.now)
        console.step("the cluster is down")


def _up(options: argparse.Namespace, console: Console) -> None:
    running = None if options.foreground else _still_up(load_state())
    config = read_config(options, console, beside=running is not None)
    if not options.foreground:
        if running is None and not config.ray.local and session.serves(config.ray.address):
            running = RunningCluster(address=config.ray.address, token="", config="")
        if running is not None:
            _change(running, config, options, console)
            return
        if options.dry_run:
            raise Unavailable("no cluster is up here: all of it would be started")
    state = bring_up(config, options.config, console)
    if not options.foreground:
        show_endpoints(state, config, console)
        return
    interrupted = threading.Event()
    _handle_stop_signals(lambda *_: interrupted.set())
    try:
        show_endpoints(state, config, console)
        console.step("running; Ctrl-C stops the cluster")
        while not interrupted.wait(_WATCH_S):
            check_alive(state)
    finally:
        stop(state, console, now=False)


def _still_up(known: RunningCluster | None) -> RunningCluster | None:
    """The known cluster, unless it was on a Ray of others that has started anew without it, or its
    start was cut off."""
    if known is None or known.owned:
        return known
    with file_lock(_lock_file()):  # which a start holds to its end
        known = load_state()
        if known is None or known.owned or session.serves(known.address):
            return known
        forget_state(known)
    return None


def _lock_file() -> Path:
    """Held by the one `baton up` that starts or changes the cluster."""
    return run_dir() / "up.lock"


def _change(
    running: RunningCluster, config: ClusterConfig, options: argparse.Namespace, console: Console
) -> None:
    """Give the cluster that is up another configuration."""
    with file_lock(_lock_file()):
        running = load_state() or running  # it may have been starting
        session.connect(running)
        from cluster.cli.change import change

        try:
            changed = change(running, config, options.config, console, dry_run=options.dry_run)
        finally:
            session.disconnect()
    if changed is not running:
        show_endpoints(changed, config, console)


def check_alive(state: RunningCluster) -> None:
    """Raise Unavailable when the cluster's Ray is gone, which nothing restarts: a supervisor of
    `baton up --foreground` can."""
    lost = lost_daemons(state) if state.alive else ["the head process"]
    if lost:
        raise Unavailable(f"the cluster has lost {' and '.join(lost)}; see {head_log()}")


def read_config(
    options: argparse.Namespace, console: Console, *, beside: bool = False
) -> ClusterConfig:
    """The configuration named on the command line, checked against the model, which is fetched if
    Baton knows how to make it. beside: its predecessor runs and has the memory now."""
    loaded = load_config(options.config, overrides=options.overrides, environ=os.environ)
    config, name = loaded.config, loaded.config.model.name
    check_fields(config)
    if name in SOURCES:
        console.step(f"model: {get_model(name)}")
    model = find_model(name)
    for warning in (*loaded.warnings, *warnings_of(config)):
        console.warn(warning)
    models = {role: find_model(config.model_name(role)) for role in Role}
    check_config(config, model, models, free_memory=not beside)
    if config.ray.local:  # elsewhere workers and routers read their own machines' files
        check_folder(config, model)
    return _with_absolute_paths(config)


def _with_absolute_paths(config: ClusterConfig) -> ClusterConfig:
    """Replicas run in another directory."""

    def located(name: str) -> str:
        path = find_model(name)
        return name if path.is_relative_to(models_dir()) else str(path)

    prefill, decode = (
        replace(pool, model=located(pool.model)) if pool.model else pool
        for pool in (config.prefill, config.decode)
    )
    model = replace(config.model, name=located(config.model.name))
    return replace(config, model=model, prefill=prefill, decode=decode)


def bring_up(config: ClusterConfig, source: str, console: Console) -> RunningCluster:
    """Start the cluster and wait until it serves. After a failure, Ctrl-C, SIGTERM or the loss of
    the terminal everything that was started is stopped."""
    for number in set(_stop_signals()) - {signal.SIGINT}:
        signal.signal(number, signal.default_int_handler)  # acts like Ctrl-C
    state = None
    try:
        with file_lock(_lock_file()):  # of two concurrent `baton up`, one starts
            existing = load_state()
            if existing is not None:
                raise InvalidRequest(
                    f"a cluster is up already ({existing.config}): `baton down` first"
                )
            clean_up_dead()
            # A signal between the spawn and its record in `state` would leave Ray running.
            with _stop_signals_deferred() if config.ray.local else contextlib.nullcontext():
                state = _spawn_or_attach(config, source)
            state = _wait_for_ray(state, console)
            with _exit_with_head(state, console):
                state = _deploy(config, state, console)
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
    """Take down the cluster that this command started. A stop signal only cuts the drain short, so
    that no process is left behind."""
    before = {number: signal.getsignal(number) for number in _stop_signals()}
    try:
        _handle_stop_signals(_ignore if now else _interrupt_once)
        take_down(state, console, now=now)
    except KeyboardInterrupt:
        console.step("stopping at once")
        take_down(state, console, now=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, SIGTERM and, unless nohup ignores it, the loss of the terminal."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,)))


def _handle_stop_signals(handler: Callable[..., None]) -> None:
    for number in _stop_signals():
        signal.signal(number, handler)


def _ignore(*_: object) -> None:
    """In place of SIG_IGN, which child processes would inherit."""


def _interrupt_once(*_: object) -> None:
    _handle_stop_signals(_ignore)  # the clean-up that follows is not interrupted again
    raise KeyboardInterrupt


@contextlib.contextmanager
def _stop_signals_deferred() -> Iterator[None]:
    """Raise KeyboardInterrupt for stop signals after the block instead of in it."""
    interrupted = threading.Event()
    before = {number: signal.getsignal(number) for number in _stop_signals()}
    _handle_stop_signals(lambda *_: interrupted.set())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if interrupted.is_set():
            raise KeyboardInterrupt


@contextlib.contextmanager
def _exit_with_head(state: RunningCluster, console: Console) -> Iterator[None]:
    """Exit this process when the head process ends during the block, after `baton down` elsewhere
    or a crash. Ray's client would otherwise retry for a minute, with nothing left to stop."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            if not state.alive:
                console.error("the cluster was taken down meanwhile")
                os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()  # so that it cannot exit the process while `stop` ends the head


def show_endpoints(state: RunningCluster, config: ClusterConfig, console: Console) -> None:
    name = config.model.served_name or find_model(config.model.name).name
    scheme = "https" if config.router.settings.tls.enabled else "http"
    console.say(f"{name} is served at {scheme}://{state.http}/v1 (OpenAI) and {state.grpc} (gRPC)")
    if state.owned:
        console.step(f"logs: {session_logs(state)}")


def _spawn_or_attach(config: ClusterConfig, source: str) -> RunningCluster:
    """The Ray cluster to use. The state of a local one is saved at once, so that `baton down` finds
    it even if this process is killed."""
    path = str(find_config(source).absolute())
    if not config.ray.local:
        state = RunningCluster(address=config.ray.address, token="", config=path)
        session.connect(state)
        _check_free(config)
        save_state(state)  # so that `baton down` finds what this process leaves if it is killed
        return state
    check_listening(config.network)
    spawned = spawn_local_ray(config.ray, path)
    try:
        save_state(spawned)
    except BaseException:
        stop_local_ray(spawned)
        raise
    return spawned


def _wait_for_ray(state: RunningCluster, console: Console) -> RunningCluster:
    if state.owned:
        session.prepare(state)
        import cluster.serve.deployments  # noqa: F401 - takes a second, while Ray starts

        state = wait_local_ray(state)
        console.step("Ray is up")
    return state


def _deploy(config: ClusterConfig, state: RunningCluster, console: Console) -> RunningCluster:
    """Deploy all pools and wait until they are ready; the state with the front ends' addresses."""
    session.connect(state)
    from cluster.cli.waiting import wait_ready
    from cluster.membership.directory import create_directory
    from cluster.serve.deployments import deploy
    from cluster.serve.pool_backend import ServePools

    session.quiet_serve()
    if state.owned:
        _check_free(config)
    deadline = time.monotonic() + config.lifecycle.start_timeout_s
    deploy(config, create_directory(config, ServePools))
    console.step("deployed; loading the model")
    router = wait_ready(config, console, deadline=deadline)
    session.disconnect()
    return replace(
        state,
        http=reachable(router.http, router.node),
        grpc=reachable(router.grpc, router.node),
    )


def _check_free(config: ClusterConfig) -> None:
    """Raise unless the connected Ray runs no Baton cluster and has room for this one. On a Ray
    that Baton does not own, call before anything that a failure would take down."""
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
    from cluster.membership.store import ClusterStore
    from cluster.serve.control import undeploy

    directory, secret, drain_s = None, b"", LifecycleSection().drain_s
    try:
        try:
            directory = find_directory()
            calls = directory.config.remote(), directory.secret.remote()
            known, secret = session.ask(*calls)
            drain_s = known.lifecycle.drain_s
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
            if secret:
                ClusterStore(secret).clear()
    finally:
        session.disconnect()
