"""Two routers on the same two ports: exact tokens. One is killed or frozen: its requests end, those
of the other continue, and abandoned work is cancelled."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from protocol.wire import inference_pb2 as wire
from tests.cluster.conftest import (
    CHUNK,
    CHUNKED,
    MODEL,
    PATIENT,
    SMALL_KV,
    Baton,
    get_cluster,
    session_processes,
)
from tests.cluster.load import LONG, TIMEOUT_S, ask, ask_all, wait_until
from tests.support import services
from tests.support.ports import free_port
from tests.support.prompts import prompts as prompts_of_all_lengths
from tests.support.smollm2 import TeacherForced

GREEDY = {"temperature": 0.0, "ignore_eos": True}
TOKENS = 256
#: Keeps the prefill worker busy for seconds.
PREFILL_TOKENS = 3000
EACH = 3
WORK = ("running", "waiting", "held_blocks", "quarantined_blocks")


class Stream:
    """One request, read in a thread: what has come of it and how it ended."""

    def __init__(self, pieces: Iterator[list[int]], router: str = "") -> None:
        self.router = router
        self.token_ids: list[int] = []
        self.error: Exception | None = None
        self._pieces = pieces
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def _read(self) -> None:
        try:
            for ids in self._pieces:
                self.token_ids.extend(ids)
        except (grpc.RpcError, httpx.TransportError) as error:
            self.error = error


def over_grpc(channel: grpc.Channel, **fields: object) -> Iterator[list[int]]:
    request = wire.GenerateRequest(**GREEDY, **fields)
    for message in services.InferenceStub(channel).Generate(request, timeout=TIMEOUT_S):
        yield [number for choice in message.choices for number in choice.token_ids]


def over_http(baton: Baton, prompt: str) -> Iterator[list[int]]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True, **GREEDY}
    url = f"http://{baton.state()['http']}/v1/completions"
    with httpx.stream(
        "POST", url, json=body | {"return_token_ids": True}, timeout=TIMEOUT_S
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                yield [number for choice in choices for number in choice["token_ids"]]


def own(channel: grpc.Channel) -> wire.RouterInfo:
    """The router at the other end, which lists itself first."""
    return get_cluster(channel).routers[0]


def workers(channel: grpc.Channel) -> dict[str, wire.Worker]:
    return {pool.role: pool.workers[0] for pool in get_cluster(channel).pools}


class Connections:
    """Connections of their own, by the router that they reached."""

    def __init__(self, baton: Baton) -> None:
        self._address = str(baton.state()["grpc"])
        self._stack = ExitStack()
        self.to: dict[str, list[grpc.Channel]] = {}

    def connect_until(self, enough: Callable[[], bool]) -> None:
        for _ in range(200):
            if enough():
                return
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.insecure_channel(self._address, options=options)
            self._stack.callback(channel.close)
            self.to.setdefault(own(channel).router_id, []).append(channel)
        raise AssertionError(f"all connections went to {list(self.to)}")

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def baton(shared_baton: Baton, short_model: Path) -> Baton:
    """Two routers, one prefill and one decode worker, in float32."""
    own = [f"network.{name}={free_port()}" for name in ("http_port", "grpc_port")]
    own += ["router.replicas=2", "lifecycle.health_timeout_s=3", "model.dtype=float32"]
    baton = replace(shared_baton, model=short_model)
    baton.up("local-cpu.yaml", *CHUNKED, *PATIENT, *SMALL_KV, *own)
    return baton


@pytest.fixture(scope="module")
def expected(baton: Baton) -> list[int]:
    """What every stream says in the end."""
    return ask(baton, LONG, tokens=TOKENS).token_ids[0]


@pytest.fixture
def routers(baton: Baton) -> Iterator[Connections]:
    with closing(Connections(baton)) as found:
        found.connect_until(lambda: [len(c) > EACH for c in found.to.values()].count(True) == 2)
        yield found


def requests(routers: Connections) -> dict[str, int]:
    """How many each router has in flight."""
    return {name: own(channels[0]).requests for name, channels in routers.to.items()}


def begin(baton: Baton, routers: Connections) -> list[Stream]:
    """Streams over both front ends of both routers, and a long prompt at each."""
    streams = [
        Stream(over_grpc(channel, prompt=LONG, max_tokens=TOKENS), name)
        for name, channels in routers.to.items()
        for channel in channels[:EACH]
    ]
    while not all(count > EACH for count in requests(routers).values()):
        streams.append(Stream(over_http(baton, LONG)))
        wait_until(lambda: sum(requests(routers).values()) == len(streams))
    wait_until(lambda: all(stream.token_ids for stream in streams))
    for number, (name, channels) in enumerate(routers.to.items()):
        ids = [number, *(1000 + i for i in range(PREFILL_TOKENS))]
        prompt = wire.TokenIds(ids=ids)
        pieces = over_grpc(channels[EACH], prompt_token_ids=prompt, max_tokens=8)
        streams.append(Stream(pieces, name))
    wait_until(lambda: sum(requests(routers).values()) == len(streams))
    return streams


async def test_prompts_of_1_to_1500_tokens(baton: Baton, short_oracle: TeacherForced) -> None:
    """The tokens that leave a real cluster are those of transformers on the same weights."""
    asked = prompts_of_all_lengths(24, chunk=CHUNK, longest=1500)
    outputs = await ask_all(baton, asked, 48)
    assert [len(output) for output in outputs] == [48] * 24
    assert short_oracle.differences(asked, outputs) == {}


@pytest.mark.chaos
def test_killed_router_takes_only_its_own_requests_along(
    baton: Baton, routers: Connections, expected: list[int]
) -> None:
    streams = begin(baton, routers)
    before = requests(routers)
    killed, _ = processes(baton, "ray::ServeReplica:router:router")
    os.kill(killed, signal.SIGKILL)

    # Its clients are told at once.
    wait_until(lambda: any(stream.error and stream.router for stream in streams))
    (dead,) = {stream.router for stream in streams if stream.error and stream.router}
    (alive,) = before.keys() - {dead}
    wait_until(lambda: [s.over for s in streams].count(True) == before[dead])
    assert all(s.error for s in streams if s.over or s.router == dead)
    codes = {s.error.code() for s in streams if isinstance(s.error, grpc.RpcError)}
    assert codes == {grpc.StatusCode.UNAVAILABLE}

    # Its requests end; those of the other router, and new ones, are served.
    watch = routers.to[alive][0]
    wait_until(lambda: workers(watch)["decode"].running == before[alive])
    wait_until(lambda: prompts(workers(watch)["prefill"]) <= 1)
    assert [stream.over for stream in streams].count(True) == before[dead]
    for _ in range(4):
        assert ask(baton, LONG).token_ids[0] == expected[:8]

    wait_until(lambda: all(stream.over for stream in streams))
    *answers, prompt = (stream.token_ids for stream in streams if not stream.error)
    assert answers == [expected] * (before[alive] - 1)
    assert len(prompt) == 8
    wait_until(lambda: all(idle(worker) for worker in workers(watch).values()))

    # Another one has taken its place.
    wait_until(lambda: len(ready(watch)) == 2 and dead not in ready(watch))
    wait_until(lambda: shown(baton) == ready(watch))
    wait_until(lambda: len(processes(baton, "grammar.trial")) == 2)
    (fresh,) = ready(watch) - {alive}
    routers.connect_until(lambda: fresh in routers.to)
    answer = over_grpc(routers.to[fresh][0], prompt=LONG, max_tokens=8)
    assert [number for piece in answer for number in piece] == expected[:8]


@pytest.mark.chaos
def test_frozen_router_is_ended_and_replaced(
    baton: Baton, routers: Connections, expected: list[int]
) -> None:
    streams = [
        Stream(over_grpc(channels[0], prompt=LONG, max_tokens=TOKENS), name)
        for name, channels in routers.to.items()
    ]
    wait_until(lambda: all(stream.token_ids for stream in streams))
    frozen, _ = processes(baton, "ray::ServeReplica:router:router")
    os.kill(frozen, signal.SIGSTOP)

    # Its client does not wait for what will never come, the other's notices nothing.
    wait_until(lambda: all(stream.over for stream in streams))
    wait_until(lambda: frozen not in processes(baton, "ray::ServeReplica:router:router"))
    (lost,) = (stream for stream in streams if stream.error)
    (whole,) = (stream for stream in streams if not stream.error)
    assert whole.token_ids == expected
    assert isinstance(lost.error, grpc.RpcError)
    assert lost.error.code() is grpc.StatusCode.UNAVAILABLE
    watch = routers.to[whole.router][0]
    wait_until(lambda: all(idle(worker) for worker in workers(watch).values()))
    wait_until(lambda: len(ready(watch)) == 2 and lost.router not in ready(watch))
    wait_until(lambda: shown(baton) == ready(watch))


def processes(baton: Baton, title: str) -> list[int]:
    found = session_processes(int(baton.state()["pid"]))
    return [int(row.split()[1]) for row in found if title in row]


def prompts(worker: wire.Worker) -> int:
    return worker.running + worker.waiting


def idle(worker: wire.Worker) -> bool:
    return not any(getattr(worker, name) for name in WORK)


def ready(channel: grpc.Channel) -> set[str]:
    """The routers that one of them shows."""
    return {router.router_id for router in get_cluster(channel).routers if router.state == "ready"}


def shown(baton: Baton) -> set[str]:
    """Those that `status` shows, if there are as many as wanted."""
    rows = [line.split() for line in baton.run("status").stdout.splitlines()]
    if ["router", "2", "2", "2", "running"] not in rows:
        return set()
    named = [row for row in rows if row and row[0].startswith("router-")]
    return {row[0] for row in named if row[1] == "ready"}
