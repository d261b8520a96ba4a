"""Starting and stopping, also when it goes wrong: nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from cluster.client import InferenceClient, Options, Outcome
from tests.cluster.conftest import ROOT, Baton, session_processes
from tests.cluster.load import LONG, answer, load, wait_until


def ask(baton: Baton, prompt: str) -> Outcome:
    client = InferenceClient(str(baton.state()["grpc"]))
    outcome = Outcome()
    for _ in client.complete(prompt, Options(max_tokens=8, temperature=0.0, timeout=60.0), outcome):
        pass
    client.close()
    return outcome


def test_tensor_parallel_decode_and_a_lost_rank(baton: Baton) -> None:
    """Prefill of one rank, decode of three, in float32. A killed rank gets its replica replaced,
    and `down` leaves no process."""
    baton.up("local-cpu-tp.yaml")
    session = int(baton.state()["pid"])
    prompt = "The capital of France is the city of Paris, and the capital of Spain is"
    before = ask(baton, prompt)
    assert before.completion_tokens == 8
    followers = [row for row in session_processes(session) if "FollowerRank" in row]
    assert len(followers) == 2
    (old,) = baton.pool("decode")
    os.kill(int(followers[0].split()[1]), signal.SIGKILL)
    deadline = time.monotonic() + 90
    while not baton.pool("decode") - {old}:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert ask(baton, prompt).token_ids == before.token_ids
    followers = [row for row in session_processes(session) if "FollowerRank" in row]
    assert len(followers) == 2
    baton.run("down")
    assert session_processes(session) == []
    assert not (baton.home / "run" / "cluster.json").exists()


def test_taken_port_is_named_and_nothing_stays(baton: Baton) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = baton.run(
            *baton.up_arguments(
                "local-cpu.yaml", "prefill.replicas=0", f"network.http_port={port}"
            ),
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("baton: error: ")
    assert f"127.0.0.1:{port}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert_nothing_stays(baton)


def test_interrupted_start_leaves_nothing(baton: Baton) -> None:
    process = start(baton, *baton.up_arguments("local-cpu.yaml"))
    read_until(process, "loading the model")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert_nothing_stays(baton)


def test_foreground_with_no_prefill_at_first(baton: Baton) -> None:
    arguments = baton.up_arguments("local-cpu.yaml", "prefill.replicas=0")
    process = start(baton, *arguments, "--foreground")
    read_until(process, "Ctrl-C stops the cluster")
    # No prefill worker: decode computes the prompt itself. Then the pool is scaled from nothing.
    assert ask(baton, LONG).completion_tokens == 8
    baton.run("scale", "--prefill", "1")
    assert len(baton.pool("prefill")) == 1
    assert ask(baton, LONG).completion_tokens == 8
    baton.run("scale", "--prefill", "0")
    assert baton.pool("prefill") == set()
    assert ask(baton, LONG).completion_tokens == 8
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 0
    assert_nothing_stays(baton)


def test_routers_share_ports_and_leave_unnoticed(baton: Baton) -> None:
    """Two routers on the same two ports; one leaves while eight clients stream."""
    ports = [f"network.{name}={free_port()}" for name in ("http_port", "grpc_port")]
    baton.up("local-cpu.yaml", "prefill.replicas=0", "router.replicas=2", *ports)
    client = InferenceClient(str(baton.state()["grpc"]))
    expected = answer(client, LONG).token_ids
    client.close()
    with load(baton, expected, clients=8) as running:
        wait_until(lambda: running.finished >= 8, seconds=60)
        baton.run("scale", "--router", "1")
        before = running.finished
        wait_until(lambda: running.finished >= before + 8, seconds=60)
    assert running.errors == []
    assert running.wrong == []


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start(baton: Baton, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        baton.argv(*arguments),
        env=baton.env,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A job of a shell script's background ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} was not printed: {''.join(seen)}")


def assert_nothing_stays(baton: Baton) -> None:
    """No process that carries this cluster's home in its environment."""
    assert not (baton.home / "run" / "cluster.json").exists()
    wanted = f"BATON_HOME={baton.home}".encode()
    left = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            left.append(entry.name)
    assert left == []
