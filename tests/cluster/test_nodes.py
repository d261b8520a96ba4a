"""Pools on machines of their own: who is placed where, and what becomes of the requests when
machines lose power and others join."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.cluster.conftest import CHUNKED, PATIENT, SMALL_KV, Baton, get_cluster
from tests.cluster.load import LONG, TOKENS, ask, load, wait_until
from tests.cluster.nodes import Nodes

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 without being told"
)

HEAD, PREFILL, DECODE, OTHER_DECODE = (f"127.0.0.{n}" for n in (1, 2, 3, 4))
NEW_PREFILL, NEW_DECODE = "127.0.0.5", "127.0.0.6"
NEW_MACHINE_S = 480.0  # Ray notices the loss, the new one starts, its replica loads


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    nodes.start(HEAD, "router", cpus=4)
    yield nodes
    nodes.close()


def hosts(baton: Baton) -> dict[str, list[str]]:
    """Where the workers of each pool are."""
    with grpc.insecure_channel(str(baton.state()["grpc"])) as channel:
        cluster = get_cluster(channel)
    workers = {pool.role: pool.workers for pool in cluster.pools}
    return {
        role: sorted(w.address.rpartition(":")[0] for w in pool if w.state == "ready")
        for role, pool in workers.items()
    }


@pytest.mark.chaos
def test_machines_are_lost_and_replaced_without_a_lost_request(
    nodes: Nodes, baton: Baton, short_model: Path
) -> None:
    baton = replace(baton, model=short_model, settings=nodes.token)
    machines = {PREFILL: "prefill", DECODE: "decode", OTHER_DECODE: "decode"}
    nodes.start_together(machines, cpus=1)
    placement = [
        f"{pool}.placement={{cpus: 1, labels: {{baton.io/pool: {pool}}}}}"
        for pool in ("prefill", "decode", "router")
    ]
    shared = [f"ray.address={nodes.address}", "network.worker_host=auto", "decode.replicas=2"]
    baton.up("local-cpu.yaml", *CHUNKED, *PATIENT, *SMALL_KV, *shared, *placement)
    placed = {"prefill": [PREFILL], "decode": [DECODE, OTHER_DECODE]}
    wait_until(lambda: hosts(baton) == placed)

    outcome = ask(baton, LONG, tokens=TOKENS)
    assert outcome.timeline is not None
    spans = {span.phase: span for span in outcome.timeline.spans}
    assert spans["prefill"].place in baton.pool("prefill")
    assert spans["transfer"].counts["bytes"] > 0
    with load(baton, outcome.token_ids[0], clients=4) as running:
        wait_until(lambda: running.finished >= 4)
        nodes.kill(DECODE)
        before = running.finished
        wait_until(lambda: running.finished >= before + 4)
        nodes.kill(PREFILL)
        before = running.finished
        wait_until(lambda: running.finished >= before + 4)  # decode prefills itself
        nodes.start_together({NEW_PREFILL: "prefill", NEW_DECODE: "decode"}, cpus=1)
        there = {"prefill": [NEW_PREFILL], "decode": [OTHER_DECODE, NEW_DECODE]}
        wait_until(lambda: hosts(baton) == there, seconds=NEW_MACHINE_S)
        before = running.finished
        wait_until(lambda: running.finished >= before + 4)
    assert running.errors == []
    assert running.wrong == []
    baton.run("down")
