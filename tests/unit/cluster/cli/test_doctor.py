"""`baton doctor` on machines of values."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.cli import doctor
from cluster.cli.console import Console
from cluster.cli.doctor import Finding, Severity
from cluster.config.schema import NetworkSection


def found(look: Callable[[], Iterator[Finding]]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in look()}


def test_this_machine_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(argparse.Namespace(config=None), Console()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["WHAT", "FOUND"]
    assert any("packages" in line and "torch" in line for line in lines)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("ray", "no-such-thing"))
    packages = found(doctor._software)["packages"]
    assert packages.severity is Severity.FAIL
    assert packages.text.endswith("not installed: no-such-thing")
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "deep" / "er"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 << 30))
    looks = found(doctor._memory_and_disk)
    assert looks["models and state"].text == f"3.0 GiB free at {tmp_path}: less than 5 GiB"
    assert looks["temporary files"].severity is Severity.OK
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    assert found(doctor._limits)["open files"].severity is Severity.WARN
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "half of their speed" in found(doctor._compilers)["C++ compiler"].text


def test_ports_that_are_taken_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        findings = list(doctor._ports(NetworkSection(http_port=port, grpc_port=0)))
    assert [(f.subject, f.severity) for f in findings] == [("network.http_port", Severity.WARN)]
    assert findings[0].text == f"127.0.0.1:{port}: Address already in use"


def test_gpus_are_listed_with_what_torch_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"--query-gpu=name,memory.free,driver_version": ["H200, 140000 MiB, 580.1"]}
    monkeypatch.setattr(doctor, "_output", lambda *command: answers.get(command[1], []))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    looks = found(doctor._gpus)
    assert looks["GPU 0"].text == "H200, 140000 MiB, 580.1"
    assert looks["torch"].severity is Severity.WARN
    assert "it cannot use these GPUs" in looks["torch"].text
