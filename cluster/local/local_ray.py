"""Starts, finds and stops the Ray cluster that Baton owns on this machine.

All of its processes are in one session (setsid) led by `cluster.local.ray_head`, so that `stop`
finds every one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from cluster.config.schema import RaySection
from cluster.local.paths import baton_home, import_root, run_dir
from protocol.errors import Unavailable

_START_S = 60.0
_STOP_S = 10.0
_KILL_S = 1.0
_POLL_S = 0.02
_RAY_DIR = "ray"
_DAEMONS = ("gcs_server", "raylet")
#: Logical CPUs offered when the configuration names none: thread counts bound CPU workers.
_PLENTY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """The cluster that this user started or attached to on this machine.

    http, grpc: front ends of a router, once one is ready. token: Ray's. pid, started: of the head
    process, with its start time in clock ticks since boot, so that a reused pid is recognised; 0
    for a Ray cluster that Baton does not own. boot: since when this machine counts pids (_boot).
    temp_dir: private folder of its Ray's files.
    """

    address: str
    token: str
    config: str
    http: str = ""
    grpc: str = ""
    pid: int = 0
    started: int = 0
    boot: str = ""
    temp_dir: str = ""

    @property
    def owned(self) -> bool:
        """Whether Baton started this Ray cluster and ends it."""
        return self.pid != 0

    @property
    def alive(self) -> bool:
        """Whether the head process runs; assumed for a Ray cluster that Baton does not own."""
        if not self.owned:
            return True
        head = _process(self.pid)
        if head is None or head.ended or self.of_another_boot:
            return False
        return head.started == self.started

    @property
    def of_another_boot(self) -> bool:
        """Whether the machine or container has started anew since: its pids are of others now."""
        return self.boot not in ("", _boot())


def load_state() -> RunningCluster | None:
    """The cluster started here, if its head is alive."""
    state = _read_state()
    return state if state is not None and state.alive else None


def clean_up_dead() -> bool:
    """Remove what a cluster left whose head has died; whether there was one."""
    state = _read_state()
    if state is None or state.alive:
        return False
    stop_local_ray(state)
    forget_state(state)
    return True


def save_state(state: RunningCluster) -> None:
    """Record the cluster, readable by this user only because it holds Ray's token."""
    path = _state_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.touch(mode=0o600)
    temporary.chmod(0o600)
    temporary.write_text(json.dumps(asdict(state)))
    temporary.rename(path)


def forget_state(state: RunningCluster) -> None:
    """Delete the record of the cluster, unless it is of another one that was started since."""
    known = _read_state()
    if known is None or (known.pid, known.started) == (state.pid, state.started):
        _state_file().unlink(missing_ok=True)


def ray_environment(token: str) -> dict[str, str]:
    """Ray's settings for every process that talks to an owned cluster. They must be in the
    environment before ray is imported."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Idle workers for tasks, which Baton never submits, cost memory and start-up time.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # By default Ray runs workers at nice 15: any busy client on the machine would starve them.
        "RAY_worker_niceness": "0",
        # Ray would kill workers when other programs fill the machine's memory.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray's own metrics and its ten control loops a second take cores from the engines.
        "RAY_enable_metrics_collection": "0",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
        # A replica that fails its health checks is frozen or broken: a graceful shutdown would
        # hold its clients, and the GPU that its replacement needs.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    }


def spawn_local_ray(section: RaySection, config_name: str) -> RunningCluster:
    """Start a Ray cluster on this machine; `wait_local_ray` then waits until it answers."""
    ready, log = _ready_file(), head_log()
    ready.parent.mkdir(parents=True, exist_ok=True)
    ready.unlink(missing_ok=True)
    token = secrets.token_hex(32)
    with log.open("w") as sink:
        # Ray opens its folder to all users (0777), so it is inside one that is private (0700).
        # Below /tmp, because Ray puts Unix sockets into it, whose paths must stay short.
        temp_dir = tempfile.mkdtemp(prefix="baton-", dir="/tmp")
        options = {
            "num_cpus": section.num_cpus or _PLENTY,
            "object_store_bytes": section.object_store_bytes,
            "temp_dir": str(Path(temp_dir) / _RAY_DIR),
        }
        head = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.ray_head", str(ready), json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            env=_environment(token),
            cwd="/",
        )
    process = _process(head.pid)
    assert process is not None  # even a head that has ended stays a zombie of this process
    return RunningCluster(
        address="",
        token=token,
        config=config_name,
        pid=head.pid,
        started=process.started,
        boot=_boot(),
        temp_dir=temp_dir,
    )


def wait_local_ray(state: RunningCluster) -> RunningCluster:
    """The cluster with its address, once it answers. Raises Unavailable; the caller then still has
    to stop it."""
    deadline = time.monotonic() + _START_S
    while not _ready_file().exists():
        if not state.alive or time.monotonic() > deadline:
            raise Unavailable(f"Ray did not start: {_last_line(head_log())} (see {head_log()})")
        time.sleep(_POLL_S)
    address = json.loads(_ready_file().read_text())["address"]
    return replace(state, address=address)


def lost_daemons(state: RunningCluster) -> list[str]:
    """The Ray daemons that an owned cluster has lost. Replicas keep serving without them, but Ray
    cannot be queried or repaired, and a client would retry for a minute and then abort."""
    if not state.owned:
        return []
    names = {process.name for process in _session_processes(state.pid) if not process.stopped}
    return [daemon for daemon in _DAEMONS if daemon not in names]


def session_logs(state: RunningCluster) -> Path:
    return Path(state.temp_dir) / _RAY_DIR / "session_latest" / "logs"


def kept_logs() -> Path:
    """The log directory of the cluster that was stopped last."""
    return run_dir() / "logs"


def head_log() -> Path:
    return run_dir() / "head.log"


def _ready_file() -> Path:
    return run_dir() / "head.json"


def _state_file() -> Path:
    return run_dir() / "cluster.json"


def stop_local_ray(state: RunningCluster) -> int:
    """End every process of an owned cluster: SIGTERM to the head, then SIGKILL to what is left.
    Returns the number of processes killed."""
    head = _process(state.pid)
    if state.of_another_boot or (head is not None and head.started != state.started):
        # The pid is reused, which Linux does only once the session of that id has no process left.
        _clear(state)
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGTERM)
    left, killed = _wait_for_end(state.pid, _STOP_S), set[int]()
    while left:  # repeated for processes started just before their parent was killed
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        killed |= {process.pid for process in left}
        left = _wait_for_end(state.pid, _KILL_S)
    _clear(state)
    return len(killed)


def _read_state() -> RunningCluster | None:
    try:
        return RunningCluster(**json.loads(_state_file().read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _environment(token: str) -> dict[str, str]:
    """This process's environment plus Ray's settings, and the path of a source checkout."""
    root = str(import_root())
    env = {**os.environ, **ray_environment(token), "BATON_HOME": str(baton_home())}
    if not root.endswith(("site-packages", "dist-packages")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    return env


class _Process(NamedTuple):
    """A process from /proc/PID/stat. ended: it is a zombie. stopped: by a signal. started: clock
    ticks since boot."""

    pid: int
    name: str
    ended: bool
    stopped: bool
    session: int
    started: int


def _process(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()  # from the third field of proc(5) on
    return _Process(
        pid=pid,
        name=head.partition("(")[2],
        ended=fields[0] == "Z",
        stopped=fields[0] == "T",
        session=int(fields[3]),
        started=int(fields[19]),
    )


def _boot() -> str:
    """Another one for each start of the machine, and for each container."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"


def _session_processes(session: int) -> list[_Process]:
    """The living processes of a session."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    found = (_process(pid) for pid in pids)
    return [p for p in found if p is not None and p.session == session and not p.ended]


def _wait_for_end(session: int, timeout_s: float) -> list[_Process]:
    """Wait until a session has no living process; returns those left after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    # The second scan finds a process that was started, and its parent ended, during the first.
    while (
        left := _session_processes(session) or _session_processes(session)
    ) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(session, os.WNOHANG)  # reaps the head if it is a child of this process
        time.sleep(_POLL_S)
    return left


def _clear(state: RunningCluster) -> None:
    """Keep the logs and remove Ray's other files."""
    source = session_logs(state)
    if source.is_dir():
        shutil.rmtree(kept_logs(), ignore_errors=True)
        with contextlib.suppress(OSError):  # on a full disk the removal matters more
            shutil.move(source.resolve(), kept_logs())
    shutil.rmtree(state.temp_dir, ignore_errors=True)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
