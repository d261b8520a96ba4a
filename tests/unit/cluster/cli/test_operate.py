"""Commands for a live cluster, against a directory that is made up."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from cluster.cli import EXIT_USAGE, main
from cluster.config.schema import ClusterConfig, ModelSection
from protocol.errors import InvalidRequest
from protocol.ids import Role


def test_a_size_without_room_leaves_the_pool_to_its_autoscaler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pins: list[tuple[frozenset[Role], bool]] = []

    def pin(roles: frozenset[Role], pinned: bool) -> frozenset[Role]:
        pins.append((roles, pinned))
        return roles

    def no_room(*_: object) -> None:
        raise InvalidRequest("decode.replicas: no room", param="decode.replicas")

    remote = SimpleNamespace
    directory = remote(
        config=remote(remote=lambda: ClusterConfig(model=ModelSection(name="m"))),
        pin=remote(remote=pin),
    )
    connected = contextlib.nullcontext(directory)
    monkeypatch.setattr("cluster.cli.session.connected", lambda: connected)
    monkeypatch.setattr("cluster.cli.session.ask", lambda *answers: list(answers))
    monkeypatch.setattr("cluster.serve.deployments.scale", no_room)
    assert main(["scale", "--decode", "99"]) == EXIT_USAGE
    assert "no room" in capsys.readouterr().err
    assert pins == [(frozenset({Role.DECODE}), True), (frozenset({Role.DECODE}), False)]
