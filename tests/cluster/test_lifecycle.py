"""Starting and stopping, also when it goes wrong: nothing is ever left behind."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, Baton
from tests.cluster.load import LONG, TOKENS, ask, load, wait_until
from tests.support.ports import free_port


def test_a_pool_that_cannot_start_is_named_and_nothing_stays(baton: Baton) -> None:
    fields = ["prefill.replicas=0", "decode.placement.env.BATON_LOG_LEVEL=LOUD"]
    done = baton.run(*baton.up_arguments("local-cpu.yaml", *fields), check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("baton: error: the decode pool cannot start: ")
    assert "BATON_LOG_LEVEL must be one of" in last
    assert "Traceback" not in done.stderr
    assert_nothing_stays(baton)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_start_leaves_nothing(baton: Baton, signal_number: signal.Signals) -> None:
    process = start(baton, *baton.up_arguments("local-cpu.yaml"))
    read_until(process, "loading the model")
    process.send_signal(signal_number)
    assert process.wait(60) == 130
    assert_nothing_stays(baton)


@pytest.fixture(scope="module")
def foreground(shared_baton: Baton) -> subprocess.Popen[str]:
    """Two routers on the same two ports, one decode worker and no prefill worker, up for as long
    as the command that started them."""
    ports = [f"network.{name}={free_port()}" for name in ("http_port", "grpc_port")]
    sizes = ["prefill.replicas=0", "router.replicas=2"]
    arguments = shared_baton.up_arguments("local-cpu.yaml", *sizes, *ports)
    process = start(shared_baton, *arguments, "--foreground")
    read_until(process, "Ctrl-C stops the cluster")
    return process


def test_routers_share_ports_and_leave_unnoticed(
    shared_baton: Baton, foreground: subprocess.Popen[str]
) -> None:
    """One of two routers leaves while eight clients stream."""
    expected = ask(shared_baton, LONG, tokens=TOKENS).token_ids[0]
    with load(shared_baton, expected, clients=8) as running:
        wait_until(lambda: running.finished >= 8, seconds=60)
        shared_baton.run("scale", "--router", "1")
        before = running.finished
        wait_until(lambda: running.finished >= before + 8, seconds=60)
    assert running.errors == []
    assert running.wrong == []


def test_no_prefill_at_first_then_one_then_none(
    shared_baton: Baton, foreground: subprocess.Popen[str]
) -> None:
    """Without prefill workers the decode worker computes the prompt itself."""
    assert len(ask(shared_baton, LONG).token_ids[0]) == 8
    shared_baton.run("scale", "--prefill", "1")
    assert len(shared_baton.pool("prefill")) == 1
    assert len(ask(shared_baton, LONG).token_ids[0]) == 8
    shared_baton.run("scale", "--prefill", "0")
    assert shared_baton.pool("prefill") == set()
    assert len(ask(shared_baton, LONG).token_ids[0]) == 8


def test_ctrl_c_ends_a_cluster_in_the_foreground(
    shared_baton: Baton, foreground: subprocess.Popen[str]
) -> None:
    foreground.send_signal(signal.SIGINT)
    assert foreground.wait(90) == 0
    assert_nothing_stays(shared_baton)


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
