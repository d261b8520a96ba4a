"""A live cluster: requests over both front ends, scaling under load, drains and failures."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest

from baton_client import BatonClient
from tests.cluster.conftest import MODEL, Baton, session_processes
from tests.cluster.load import LONG, TOKENS, answer, ask, client_of, load, wait_until

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def client(live: Baton) -> Iterator[BatonClient]:
    with client_of(live) as client:
        yield client


def post(live: Baton, path: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://{live.state()['http']}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())


def test_chat_over_grpc(client: BatonClient) -> None:
    outcome = client.generate(
        messages=[{"role": "user", "content": QUESTION}],
        resume=False,
        max_tokens=20,
        temperature=0.0,
        timeline=True,
    ).answer()
    assert "Paris" in outcome.text
    assert outcome.finish_reason == "stop"
    assert outcome.usage is not None
    assert outcome.usage.prompt_tokens == 37
    assert outcome.timeline is not None
    spans = {span.phase: span for span in outcome.timeline.spans}
    assert {"tokenize", "route", "credit_wait", "prefill", "transfer", "decode"} <= set(spans)
    assert spans["prefill"].place.startswith("prefill-")
    assert spans["decode"].place.startswith("decode-")
    # 3 blocks of 16 tokens, 30 layers, keys and values of 3 heads of 64 in 2 bytes
    assert spans["transfer"].counts["bytes"] == 3 * 16 * 30 * 2 * 3 * 64 * 2


def test_both_front_ends_agree(live: Baton, client: BatonClient) -> None:
    over_grpc = answer(client, LONG)
    over_http = post(
        live,
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": LONG,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert over_http["choices"][0]["token_ids"] == over_grpc.token_ids[0]
    assert len(over_grpc.token_ids[0]) == TOKENS


def test_ready_and_models(live: Baton, client: BatonClient) -> None:
    assert [model.id for model in client.models(timeout_s=60)] == [MODEL]
    with urllib.request.urlopen(f"http://{live.state()['http']}/ready", timeout=60) as reply:
        assert reply.status == 200


def test_status_shows_every_pool(live: Baton) -> None:
    text = live.run("status").stdout
    assert [line.split()[0] for line in text.splitlines()[:4]] == [
        "POOL",
        "router",
        "prefill",
        "decode",
    ]
    rows = {cells[0]: cells[1:3] for cells in map(str.split, text.splitlines()) if cells}
    for worker, state in live.workers().items():
        assert rows[worker] == [worker.partition("-")[0], state]
    assert set(live.workers().values()) == {"ready"}


def test_a_second_up_to_the_foreground_is_refused(live: Baton) -> None:
    done = live.run(*live.up_arguments("local-cpu.yaml"), "--foreground", check=False)
    assert done.returncode == 2
    assert "a cluster is up already" in done.stderr


@pytest.mark.chaos
def test_killed_directory_is_not_missed(live: Baton, client: BatonClient) -> None:
    """Ray starts it again, it fills up with the next reports, and requests go on meanwhile."""
    expected = answer(client, LONG).token_ids[0]
    before = live.workers()
    rows = [row for row in session_processes(int(live.state()["pid"])) if "ray::Directory" in row]
    os.kill(int(rows[0].split()[1]), signal.SIGKILL)
    for _ in range(3):
        assert answer(client, LONG).token_ids[0] == expected
    wait_until(lambda: live.workers() == before)
    assert answer(client, LONG).token_ids[0] == expected


def test_scale_under_load_fails_nothing(live: Baton, client: BatonClient) -> None:
    """1+1 -> 2+2 -> 1+1 with eight clients: no error, no wrong token, and the pool that is not
    scaled keeps its workers."""
    expected = answer(client, LONG).token_ids[0]
    prefill, decode = live.pool("prefill"), live.pool("decode")
    with load(live, expected, clients=8) as running:
        live.run("scale", "--prefill", "2")
        assert live.pool("decode") == decode
        wait_until(lambda: live.pool("prefill") > prefill)
        live.run("scale", "--decode", "2")
        wait_until(lambda: live.pool("decode") > decode)
        assert len(live.pool("prefill")) == 2
        before = running.finished
        wait_until(lambda: running.finished >= before + 8)
        live.run("scale", "--prefill", "1", "--decode", "1")
    assert running.errors == []
    assert running.wrong == []
    assert running.finished > 16
    print(f"{running.finished} requests, longest gap between tokens {running.worst_gap_s:.2f} s")
    wait_until(lambda: len(live.pool("prefill")) == len(live.pool("decode")) == 1)


def test_drained_worker_is_replaced(live: Baton, client: BatonClient) -> None:
    (old,) = live.pool("prefill")
    done = live.run("drain", old)
    assert f"{old} is draining" in done.stdout
    wait_until(lambda: bool(live.pool("prefill") - {old}))
    wait_until(lambda: old not in live.workers())
    outcome = answer(client, LONG)
    assert outcome.timeline is not None
    places = {span.place for span in outcome.timeline.spans}
    assert old not in places


def test_a_live_worker_changes_its_role_and_back(live: Baton, client: BatonClient) -> None:
    """1+1 -> 0+2 -> 1+1 with four clients: no error, no wrong token, no new process."""
    expected = answer(client, LONG).token_ids[0]
    (prefill,), (decode,) = live.pool("prefill"), live.pool("decode")
    refused = live.run("role", decode, "prefill", check=False)
    assert refused.returncode == 2
    assert f"{decode} is the only worker that decodes" in refused.stderr
    with load(live, expected, clients=4) as running:
        wait_until(lambda: running.finished >= 4)
        assert "takes the work of decode" in live.run("role", prefill, "decode").stdout
        wait_until(lambda: live.roles() == {prefill: "decode", decode: "decode"})
        before = running.finished
        wait_until(lambda: running.finished >= before + 8)
        live.run("role", prefill, "prefill")
        wait_until(lambda: live.roles() == {prefill: "prefill", decode: "decode"})
        before = running.finished
        wait_until(lambda: running.finished >= before + 8)
    assert running.errors == []
    assert running.wrong == []
    print(f"{running.finished} requests, longest gap between tokens {running.worst_gap_s:.2f} s")
    outcome = answer(client, LONG)
    assert outcome.timeline is not None
    assert prefill in {span.place for span in outcome.timeline.spans if span.phase == "prefill"}


def test_unknown_worker_is_named(live: Baton) -> None:
    done = live.run("drain", "decode-missing", check=False)
    assert done.returncode == 2
    assert "no worker 'decode-missing'; there are: decode-" in done.stderr


@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_lost_decode_worker_loses_no_request(
    live: Baton, client: BatonClient, how: signal.Signals
) -> None:
    """The only one is killed or freezes while four clients stream: every stream still gets the same
    tokens; new requests are refused until there is another. (A prefill worker is lost, with its
    machine, in test_nodes.)"""
    expected = answer(client, LONG).token_ids[0]
    old = live.pool("decode")  # one lost before may be listed
    with load(live, expected, clients=4, may_refuse=True) as running:
        wait_until(lambda: running.finished >= 4)
        wait_until(lambda: len(replica_pids(live, "decode")) == 1)
        os.kill(replica_pids(live, "decode")[0], how)
        wait_until(lambda: bool(live.pool("decode") - old))
        before = running.finished
        wait_until(lambda: running.finished >= before + 4)
    assert running.errors == []
    assert running.wrong == []


def replica_pids(live: Baton, pool: str) -> list[int]:
    title = f"ray::ServeReplica:{pool}:{pool}"
    rows = [row.split() for row in session_processes(int(live.state()["pid"])) if title in row]
    return [int(row[1]) for row in rows]


def test_no_prefill_worker_in_the_end(live: Baton) -> None:
    live.run("scale", "--prefill", "0")
    wait_until(lambda: live.pool("prefill") == set())
    assert len(ask(live, LONG).token_ids[0]) == 8
