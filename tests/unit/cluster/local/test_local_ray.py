"""Ending all processes of a session, with plain processes in place of Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.cli.console import Console
from cluster.cli.up import take_down
from cluster.config.schema import RaySection
from cluster.local import local_ray, paths, ray_head
from cluster.local.local_ray import RunningCluster, load_state, save_state, stop_local_ray

#: A head with a child; `stubborn` ones ignore SIGTERM.
HEAD = """
import os, signal, sys, time
stubborn = sys.argv[1] == "stubborn"
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # before the child begins, whenever that is
child = os.fork()
if child and not stubborn:
    def end(*_):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
if child == 0:
    os.setpgid(0, 0)
else:
    print("up", flush=True)
time.sleep(60)
"""


#: A head that starts a process for each line of its input, and ends after the last.
PARENT = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in sys.stdin:
    subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    print("born", flush=True)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for heads that ignore SIGTERM: others need time to end on a busy machine."""
    monkeypatch.setattr(local_ray, "_STOP_S", 0.5)


def start(kind: str, temp_dir: Path) -> RunningCluster:
    temp_dir.mkdir()
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, kind], start_new_session=True, stdout=subprocess.PIPE
    )
    assert head.stdout is not None
    assert head.stdout.readline() == b"up\n"
    head.stdout.close()
    process = local_ray._process(head.pid)
    assert process is not None
    return RunningCluster(
        address="h:1",
        token="",
        config="c",
        pid=head.pid,
        started=process.started,
        temp_dir=str(temp_dir),
    )


@pytest.mark.parametrize(("kind", "killed"), [("willing", 0), ("stubborn", 2)])
def test_nothing_of_the_session_is_left(
    tmp_path: Path, kind: str, killed: int, request: pytest.FixtureRequest
) -> None:
    if killed:
        request.getfixturevalue("impatient")
    state = start(kind, tmp_path / "private")
    logs = tmp_path / "private" / "ray" / "session_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker.err").write_text("why")
    (logs.parents[1] / "session_latest").symlink_to(logs.parent)
    assert len(local_ray._session_processes(state.pid)) == 2
    save_state(state)
    assert load_state() == state
    assert stop_local_ray(state) == killed
    assert local_ray._session_processes(state.pid) == []
    assert not (tmp_path / "private").exists()
    assert load_state() is None
    assert (local_ray.kept_logs() / "worker.err").read_text() == "why"


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-uc", PARENT], start_new_session=True, text=True, **pipes
    ) as process:
        bear(process)  # it reads its input from here on
        yield process
        for member in local_ray._session_processes(process.pid):
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)


def bear(parent: subprocess.Popen[str]) -> None:
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "born\n"


def test_a_process_started_and_orphaned_during_the_scan_is_found(
    parent: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (elder,) = (p for p in local_ray._session_processes(parent.pid) if p.pid != parent.pid)
    os.kill(elder.pid, signal.SIGKILL)
    while elder in local_ray._session_processes(parent.pid):  # it may take a moment to die
        time.sleep(0.01)
    look = local_ray._process

    def late(pid: int) -> local_ray._Process | None:
        if pid == parent.pid and parent.poll() is None:
            bear(parent)
            parent.kill()
            parent.wait()
        return look(pid)

    monkeypatch.setattr(local_ray, "_process", late)
    assert [process.name for process in local_ray._wait_for_end(parent.pid, 0.0)] == ["sleep"]


def test_a_process_started_during_the_kill_is_killed(
    parent: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    impatient: None,
) -> None:
    kill = os.kill

    def late(pid: int, number: int) -> None:
        if (pid, number) == (parent.pid, signal.SIGKILL) and parent.poll() is None:
            bear(parent)
        kill(pid, number)

    monkeypatch.setattr(local_ray.os, "kill", late)
    head = local_ray._process(parent.pid)
    assert head is not None
    known = {"pid": head.pid, "started": head.started, "temp_dir": str(tmp_path / "private")}
    state = RunningCluster(address="h:1", token="", config="c", **known)
    assert stop_local_ray(state) == 3
    assert local_ray._session_processes(parent.pid) == []


def test_pids_from_before_a_reboot_are_of_others(tmp_path: Path) -> None:
    state = start("willing", tmp_path / "private")
    save_state(replace(state, boot="another", temp_dir=str(tmp_path / "before")))
    assert load_state() is None
    assert local_ray.clean_up_dead()
    assert len(local_ray._session_processes(state.pid)) == 2
    assert stop_local_ray(state) == 0


def test_a_full_disk_does_not_stop_the_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_ray.shutil, "move", move)
    state = start("willing", tmp_path / "private")
    (tmp_path / "private" / "ray" / "session_latest" / "logs").mkdir(parents=True)
    assert stop_local_ray(state) == 0
    assert not (tmp_path / "private").exists()


def test_daemons_that_ray_has_lost_are_named() -> None:
    named = "open('/proc/self/comm', 'w').write('raylet'); print(flush=True); input()"
    head = subprocess.Popen(
        [sys.executable, "-c", named],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert head.stdin is not None
    assert head.stdout is not None
    head.stdout.readline()
    head.stdout.close()
    state = RunningCluster(address="h:1", token="", config="", pid=head.pid, started=1)
    assert local_ray.lost_daemons(state) == ["gcs_server"]
    head.send_signal(signal.SIGSTOP)  # Ray would end a client that waits for it
    os.waitpid(head.pid, os.WUNTRACED)
    assert local_ray.lost_daemons(state) == ["gcs_server", "raylet"]
    head.kill()
    head.wait()
    head.stdin.close()
    assert local_ray.lost_daemons(state) == ["gcs_server", "raylet"]
    assert local_ray.lost_daemons(RunningCluster(address="h:1", token="", config="")) == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("collected", [True, False])
def test_children_of_a_dead_head_are_ended(collected: bool, tmp_path: Path) -> None:
    """Also by the command that started the head, before it has reaped the process."""
    state = start("willing", tmp_path / "private")
    os.kill(state.pid, signal.SIGKILL)
    os.waitid(os.P_PID, state.pid, os.WEXITED | (0 if collected else os.WNOWAIT))
    assert not state.alive
    save_state(state)
    assert load_state() is None
    assert local_ray.clean_up_dead()
    assert not local_ray.clean_up_dead()
    assert not (tmp_path / "private").exists()
    assert local_ray._session_processes(state.pid) == []


def test_a_reused_pid_is_not_touched(tmp_path: Path) -> None:
    """The recorded start time protects a process that has the pid now."""
    state = start("willing", tmp_path / "private")
    other = RunningCluster(
        address="", token="", config="", pid=state.pid, started=state.started + 1
    )
    assert not other.alive
    save_state(other)
    assert load_state() is None
    assert local_ray.clean_up_dead()
    time.sleep(0.05)
    assert state.alive
    assert len(local_ray._session_processes(state.pid)) == 2
    stop_local_ray(state)


def test_a_late_down_keeps_the_record_of_the_next_cluster(tmp_path: Path) -> None:
    """Of two concurrent `baton down`, the slower may end after the next `baton up`."""
    old = start("willing", tmp_path / "old")
    stop_local_ray(old)
    new = start("willing", tmp_path / "new")
    save_state(new)
    take_down(old, Console(), now=True)
    assert load_state() == new
    take_down(new, Console(), now=True)
    assert local_ray._read_state() is None
    assert local_ray._session_processes(new.pid) == []


def test_failure_to_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = start("willing", tmp_path / "private")
    os.kill(state.pid, signal.SIGKILL)
    os.waitpid(state.pid, 0)
    log = local_ray.head_log()
    log.parent.mkdir(parents=True)
    log.write_text("Traceback ...\nOSError: no space left\n\n")
    with pytest.raises(local_ray.Unavailable, match="OSError: no space left"):
        local_ray.wait_local_ray(state)


def test_head_finds_our_packages_from_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("BATON_HOME", "here")
    env = local_ray._environment("token")
    root = str(Path(__file__).resolve().parents[4])
    assert env["PYTHONPATH"].split(os.pathsep) == [root, "/elsewhere"]
    assert env["BATON_HOME"] == str(Path.cwd() / "here")
    assert env["RAY_AUTH_TOKEN"] == "token"
    assert env["RAY_worker_niceness"] == "0"


def test_head_needs_no_path_when_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    site = Path("/venv/lib/python3.11/site-packages")
    monkeypatch.setattr(paths, "__name__", "baton_llm.cluster.local.paths")
    monkeypatch.setattr(paths, "__file__", str(site / "baton_llm/cluster/local/paths.py"))
    assert paths.import_root() == site
    assert "PYTHONPATH" not in local_ray._environment("token")


def test_rays_folder_is_inside_a_private_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes its own folder world-writable; links planted there would be followed."""
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def spawn(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        return popen(["sleep", "60"], start_new_session=True)

    monkeypatch.setattr(local_ray.subprocess, "Popen", spawn)
    state = local_ray.spawn_local_ray(RaySection(), "c")
    try:
        ray_dir = Path(json.loads(commands[0][-1])["temp_dir"])
        assert ray_dir.parent == Path(state.temp_dir)
        assert Path(state.temp_dir).stat().st_mode & 0o777 == 0o700
        assert local_ray.session_logs(state).is_relative_to(ray_dir)
    finally:
        stop_local_ray(state)
    assert not Path(state.temp_dir).exists()


def test_the_head_starts_a_ray_of_its_own_whatever_ray_address_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def init(**options: object) -> SimpleNamespace:
        given.update(options)
        return SimpleNamespace(address_info={"gcs_address": "h:1"})

    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:6379")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    monkeypatch.setattr(ray_head.signal, "sigwait", lambda _: None)
    monkeypatch.setattr(ray_head.signal, "pthread_sigmask", lambda *_: None)
    options = {"num_cpus": 1, "object_store_bytes": 1, "temp_dir": "/x"}
    assert ray_head.main([str(tmp_path / "state"), json.dumps(options)]) == 0
    assert given["address"] == "local"
    assert json.loads((tmp_path / "state").read_text()) == {"address": "h:1"}
