"""Clusters as a user has them: started and stopped by the command line, on ports of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from cluster.local.paths import baton_home
from cluster.models.store import find_model
from protocol.errors import NotFound
from protocol.wire import inference_pb2 as wire
from tests.support import services
from tests.support.ports import free_port
from tests.support.smollm2 import TeacherForced, some_layers

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
FREE_PORTS = ["network.http_port=0", "network.grpc_port=0"]
#: One thread a worker: two that spin for each other stand still wherever the machine is shared.
THREADS = ["prefill.engine.num_threads=1", "decode.engine.num_threads=1"]
CHUNK = 128
#: Of the 30 of SmolLM2. With the last two its outputs vary twice as much as those of all layers:
#: without them, or from the first ten, most say one word again and again. (`live` has the whole.)
LAYERS = (0, 1, 2, 3, 28, 29)
#: Prompts of several chunks, and none that is short enough to be left to the decode worker.
CHUNKED = [
    f"prefill.worker.max_num_batched_tokens={CHUNK}",
    f"decode.worker.max_num_batched_tokens={CHUNK}",
    "router.settings.local_prefill_tokens=0",
]
#: Ten thousand tokens of the whole model in bfloat16. Each start fills all of it with zeros.
SMALL_KV = [f"{pool}.engine.kv_memory_bytes=256MiB" for pool in ("prefill", "decode")]
#: Whatever lasts so long hangs. Nothing here is a measure of speed: other things run beside.
COMMAND_S = 600
TEST_S = 1200
#: Where the machine has no time for a worker for seconds, that counts as lost; requests go on.
PATIENT = [
    "router.settings.max_attempts=1000",
    "router.settings.resume_wait_s=300",
    "lifecycle.expiry_s=15",
]
CTRL_C = "test_ctrl_c_ends_a_cluster_in_the_foreground"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_S))
    # Last, so that no other cluster is up beside the one that they share; one test ends it.
    items.sort(key=_order)


def _order(item: pytest.Item) -> tuple[bool, bool, bool]:
    names = getattr(item, "fixturenames", ())
    return item.name == CTRL_C, "live" in names, "foreground" in names


@dataclass(frozen=True)
class Baton:
    """The command `baton` with a home of its own."""

    home: Path
    model: Path
    settings: Mapping[str, str] = field(default_factory=dict)  # more of its environment

    @property
    def env(self) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "RAY_"))}
        return {**own, "BATON_HOME": str(self.home), "PYTHONPATH": str(ROOT), **self.settings}

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cluster.cli", *arguments]

    def up_arguments(self, config: str, *overrides: str) -> list[str]:
        sets = [f"model.name={self.model}", f"model.served_name={MODEL}"]
        sets += [*FREE_PORTS, *THREADS, *overrides]
        path = ROOT / "deploy" / "configs" / config
        return ["up", str(path), *(part for text in sets for part in ("--set", text))]

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(*arguments),
            env=self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done

    def up(self, config: str, *overrides: str) -> None:
        self.run(*self.up_arguments(config, *overrides))

    def state(self) -> dict[str, object]:
        return json.loads((self.home / "run" / "cluster.json").read_text())

    def workers(self) -> dict[str, str]:
        """State of every worker by id, as the router's admin service shows it."""
        with grpc.insecure_channel(str(self.state()["grpc"])) as channel:
            cluster = get_cluster(channel)
        return {worker.worker_id: worker.state for pool in cluster.pools for worker in pool.workers}

    def roles(self) -> dict[str, str]:
        """The role that every worker has now."""
        with grpc.insecure_channel(str(self.state()["grpc"])) as channel:
            cluster = get_cluster(channel)
        return {worker.worker_id: pool.role for pool in cluster.pools for worker in pool.workers}

    def pool(self, name: str) -> set[str]:
        return {worker for worker in self.workers() if worker.startswith(f"{name}-")}


class Foreground:
    """A cluster that is up for as long as the command that started it."""

    def __init__(self, baton: Baton, log: Path, *arguments: str) -> None:
        self.baton = baton
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                baton.argv(*arguments),
                env=baton.env,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=output,
                # A job of a shell script's background ignores Ctrl-C, and so would all it starts.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def wait_for(self, text: str) -> None:
        """Until the command has written that."""
        deadline = time.monotonic() + COMMAND_S
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def end(self) -> None:
        """End whatever is left of it."""
        self.baton.run("down", "--now", check=False)
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(COMMAND_S)


def get_cluster(channel: grpc.Channel, metadata: Sequence[tuple[str, str]] = ()) -> wire.Cluster:
    """What a router's admin service shows. While the directory or Serve takes longer than five
    seconds to answer it, on a busy machine or as it starts again, it is asked again."""
    admin, deadline = services.AdminStub(channel), time.monotonic() + COMMAND_S
    while True:
        try:
            return admin.GetCluster(wire.GetClusterRequest(), timeout=60, metadata=metadata)
        except grpc.RpcError as error:
            busy = "the cluster does not answer" in str(error.details())
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def session_processes(session: int) -> list[str]:
    """Command lines of the living processes of a session."""
    listed = subprocess.run(
        ["ps", "-eo", "sid=,pid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 3) for line in listed.splitlines()]
    return [" ".join(row) for row in rows if int(row[0]) == session and row[2][0] != "Z"]


@pytest.fixture(scope="session")
def model_path() -> Path:
    try:
        return find_model(MODEL)
    except NotFound as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def short_model(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fifth of its layers, for tests of what a cluster does with any model."""
    return some_layers(model_path, tmp_path_factory.mktemp("short") / "smollm2", LAYERS)


def new_home(folder: Path) -> Path:
    """A home of its own, but with the kernels that are compiled for this machine already."""
    kernels = baton_home() / "native"
    kernels.mkdir(parents=True, exist_ok=True, mode=0o700)
    home = folder / "home"
    home.mkdir()
    (home / "native").symlink_to(kernels)
    return home


@pytest.fixture
def baton(tmp_path: Path, model_path: Path) -> Iterator[Baton]:
    """The command with nothing up; whatever a test leaves up is ended."""
    command = Baton(home=new_home(tmp_path), model=model_path)
    yield command
    command.run("down", "--now", check=False)


@pytest.fixture(scope="module")
def shared_baton(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Baton]:
    """The same for all tests of a module."""
    command = Baton(home=new_home(tmp_path_factory.mktemp("shared")), model=model_path)
    yield command
    command.run("down", "--now", check=False)


@pytest.fixture(scope="session")
def foreground(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Foreground]:
    """At first two routers on the same two ports, one decode worker in bfloat16 and no prefill
    worker. Every prompt is handed over, in chunks of CHUNK tokens, as soon as one can be."""
    folder = tmp_path_factory.mktemp("live")
    command = Baton(home=new_home(folder), model=model_path)
    ports = [f"network.{name}={free_port()}" for name in ("http_port", "grpc_port")]
    sizes = ["prefill.replicas=0", "router.replicas=2", "lifecycle.health_timeout_s=3"]
    arguments = command.up_arguments(
        "local-cpu.yaml", *CHUNKED, *PATIENT, *SMALL_KV, *sizes, *ports
    )
    cluster = Foreground(command, folder / "up.log", *arguments, "--foreground")
    try:
        cluster.wait_for("Ctrl-C stops the cluster")
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="session")
def live(foreground: Foreground) -> Baton:
    """The same cluster with one router, one prefill and one decode worker."""
    foreground.baton.run("scale", "--router", "1", "--prefill", "1")
    # Its router hears of the worker a moment after the directory has.
    while "ready" not in {
        state for worker, state in foreground.baton.workers().items() if worker[:7] == "prefill"
    }:
        time.sleep(0.1)
    return foreground.baton


@pytest.fixture(scope="session")
def short_oracle(short_model: Path) -> TeacherForced:
    return TeacherForced(short_model)
