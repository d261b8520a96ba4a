"""Starting and stopping, also when it goes wrong: nothing is ever left behind."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.cluster.conftest import COMMAND_S, Baton, Foreground
from tests.cluster.load import LONG, TOKENS, ask, load, wait_until


def test_a_pool_that_cannot_start_is_named_and_nothing_stays(baton: Baton) -> None:
    fields = ["prefill.replicas=0", "decode.placement.env.BATON_LOG_LEVEL=LOUD"]
    done = baton.run(*baton.up_arguments("local-cpu.yaml", *fields), check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("baton: error: the decode pool cannot start: ")
    assert "BATON_LOG_LEVEL must be one of" in last
    assert "Traceback" not in done.stderr
    assert_nothing_stays(baton)


def test_interrupted_start_leaves_nothing(baton: Baton, tmp_path: Path) -> None:
    """By either signal at other moments: tests/unit/cluster/cli/test_up.py."""
    starting = Foreground(baton, tmp_path / "log", *baton.up_arguments("local-cpu.yaml"))
    starting.wait_for("loading the model")
    starting.process.send_signal(signal.SIGTERM)
    assert starting.process.wait(COMMAND_S) == 130
    assert_nothing_stays(baton)


def test_routers_share_ports_and_leave_unnoticed(foreground: Foreground) -> None:
    """One of two routers leaves while eight clients stream."""
    baton = foreground.baton
    expected = ask(baton, LONG, tokens=TOKENS).token_ids[0]
    with load(baton, expected, clients=8) as running:
        wait_until(lambda: running.finished >= 8)
        baton.run("scale", "--router", "1")
        before = running.finished
        wait_until(lambda: running.finished >= before + 8)
    assert running.errors == []
    assert running.wrong == []


def test_no_prefill_at_first_then_one(foreground: Foreground) -> None:
    """Without prefill workers the decode worker computes the prompt itself. (test_live.py goes on
    with the one, and ends without.)"""
    baton = foreground.baton
    assert len(ask(baton, LONG).token_ids[0]) == 8
    baton.run("scale", "--prefill", "1")
    wait_until(lambda: len(baton.pool("prefill")) == 1)
    assert len(ask(baton, LONG).token_ids[0]) == 8


def test_ctrl_c_ends_a_cluster_in_the_foreground(foreground: Foreground) -> None:
    foreground.process.send_signal(signal.SIGINT)
    assert foreground.process.wait(COMMAND_S) == 0
    assert_nothing_stays(foreground.baton)


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
