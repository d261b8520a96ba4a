"""Ports and hosts of a local cluster are checked before anything starts."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from cluster.cli import up as up_command
from cluster.cli.console import Console
from cluster.config.checks import check_listening
from cluster.config.schema import ClusterConfig, ModelSection, NetworkSection, RaySection
from cluster.local.local_ray import load_state
from protocol.errors import InvalidRequest


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))


@pytest.mark.parametrize("port_name", ["http_port", "grpc_port", "metrics_port"])
def test_a_port_of_another_cluster_is_taken(
    port_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_command, "spawn_local_ray", None)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        network = NetworkSection(**({"http_port": 0, "grpc_port": 0} | {port_name: port}))
        config = ClusterConfig(model=ModelSection(name="m"), network=network)
        message = f"network.{port_name}: cannot listen on 127.0.0.1:{port}: Address already in use"
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            up_command.bring_up(config, "c.yaml", Console())


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7", "nowhere.invalid", "é.."])
@pytest.mark.parametrize("field", ["host", "worker_host"])
def test_a_host_of_another_machine_is_named(field: str, host: str) -> None:
    network = NetworkSection(http_port=0, grpc_port=0, **{field: host})
    with pytest.raises(InvalidRequest) as caught:
        check_listening(network)
    assert caught.value.param == f"network.{field}"
    assert caught.value.message.startswith(f"network.{field}: cannot listen on {host}:0: ")


@pytest.mark.parametrize("host", ["auto", "127.0.0.1", "localhost"])
def test_workers_listen_on_this_machine(host: str) -> None:
    check_listening(NetworkSection(http_port=0, grpc_port=0, worker_host=host))


def test_hosts_of_a_remote_ray_are_not_checked_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[str] = []
    monkeypatch.setattr(
        "cluster.cli.session.connect", lambda state: connected.append(state.address)
    )
    monkeypatch.setattr(up_command, "_check_free", lambda _: None)
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    config = ClusterConfig(
        model=ModelSection(name="m"),
        ray=RaySection(address="h:1"),
        network=NetworkSection(host="nowhere.invalid", worker_host="nowhere.invalid"),
    )
    up_command._spawn_or_attach(config, "c.yaml")
    assert connected == ["h:1"]
    state = load_state()  # `baton down` finds it, even if this process is killed now
    assert state is not None
    assert (state.address, state.owned) == ("h:1", False)
