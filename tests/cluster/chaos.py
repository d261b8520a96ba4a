"""A Ray cluster of several machines under load, in which something dies all the time.

    python -m tests.cluster.chaos --deaths 100 --report benchmarks/results/chaos-cluster.md

Two routers, two prefill and two decode workers in float32, each worker on a machine with a network
of its own, and one machine to spare for each pool. Sixteen clients stream, greedily or with a seed.
Workers are killed or stand still, machines vanish or are cut off for a while, routers die, the
directory stands still, the controller is lost. Every request whose router lives must end with
exactly the tokens of the undisturbed run; afterwards no request and no block may be left.

Needs root: machines are network namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from protocol.wire import inference_pb2 as wire
from tests.cluster.chaos_client import Client, get_cluster
from tests.cluster.chaos_record import Outcome, record, resumptions, total
from tests.cluster.conftest import CHUNKED, Baton
from tests.cluster.network import HEAD, NETWORK, Machines
from tests.support.chaos_load import LoadRequest, chaos_model, decided, make_load
from tests.support.ports import free_port
from tests.support.processes import alive, usage_of

CLIENTS = 16
NUM_REQUESTS = 32
#: Lengths around those of blocks and chunks.
PROMPTS = (1, 16, 17, 64, 127, 128, 129, 300, 500)
OUTPUTS = (100, 400, 1000)
SILENCE_S = 3.0
IDLE_S = 120.0
#: Between two deaths on the head.
HEAD_PAUSE_S = 8.0
#: Deaths between two looks at resources.
NOTE_EACH = 5
POOLS = ("prefill", "decode")
REPLICA = "ServeReplica"
#: What dies in a pool, each time in another order.
IN_POOL_DIES = (
    *("worker killed", "worker killed", "worker frozen", "worker stood still"),
    *("machine cut off", "machine vanished", "machine lost power"),
)
#: These kinds come back, after about the times in which they are missed.
BACK_AFTER_S = 2.0, 8.0
#: What dies on the head, in turn, and the title of its process.
ON_HEAD_DIES = {
    "directory frozen": "ray::Directory",
    "router killed": "ray::ServeReplica:router",
    "controller killed": "ray::ServeController",
    "router frozen": "ray::ServeReplica:router",
    "directory killed": "ray::Directory",
}
ON_HEAD = ("ray::ServeReplica:router", "ray::Directory", "ray::ServeController")
WORK = ("running", "waiting", "held_blocks", "quarantined_blocks")
SETTINGS = (
    "model.dtype=float32",
    "model.max_model_len=4096",
    "decode.replicas=2",
    "prefill.replicas=2",
    "router.replicas=2",
    "prefill.engine.kv_memory_bytes=64MiB",
    "decode.engine.kv_memory_bytes=64MiB",
    "network.worker_host=auto",
    "router.settings.max_attempts=1000",
    "router.settings.resume_wait_s=500",
    f"router.settings.silence_s={SILENCE_S}",
    "lifecycle.health_timeout_s=4",
)


class Chaos:
    """The machines, the clients, and what dies."""

    def __init__(self, folder: Path, model: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.outcome = Outcome()
        self.expected: dict[LoadRequest, Sequence[int]] = {}
        self._errors: list[tuple[str, str]] = []  # of requests, by router
        self.over = False
        self._machines = Machines(folder)
        self._baton = replace(
            Baton(home=folder / "home", model=model), settings=self._machines.token
        )
        self._pool_of: dict[str, str] = {}
        self._decks: dict[str, list[str]] = {pool: [] for pool in POOLS}
        self._numbers = itertools.count(10)
        self._ports = [f"network.{name}={free_port()}" for name in ("http_port", "grpc_port")]
        self._repairs: set[asyncio.Task[None]] = set()
        self._dying: set[str] = set()  # pools, and the head
        self._of_head = itertools.cycle(ON_HEAD_DIES)
        self._noted = -1
        self._clients: list[Client] = []
        self._deaths: list[tuple[float, str]] = []
        self._start = 0.0

    # --- the cluster ------------------------------------------------------------------------------

    def start(self) -> None:
        self._machines.start(HEAD, "router", cpus=4)
        with ThreadPoolExecutor(2) as starting:
            list(starting.map(self._add, 3 * POOLS))
        placement = [
            f"{pool}.placement={{cpus: 1, labels: {{baton.io/pool: {pool}}}}}"
            for pool in (*POOLS, "router")
        ]
        ray = f"ray.address={self._machines.address}"
        self._baton.up("local-cpu.yaml", *CHUNKED, *SETTINGS, *self._ports, ray, *placement)

    def _add(self, pool: str) -> str:
        host = f"{NETWORK}.{next(self._numbers)}"
        self._machines.start(host, pool, cpus=1)
        self._pool_of[host] = pool
        return host

    def stop(self) -> None:
        self._baton.run("down", "--now", check=False)
        self._machines.close()

    def channel(self) -> grpc.aio.Channel:
        """A new connection, to one of the routers that share the port."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.insecure_channel(str(self._baton.state()["grpc"]), options=options)

    async def view(self) -> wire.Cluster:
        """The cluster as some router sees it; empty if it does not answer."""
        try:
            async with self.channel() as channel:
                return await get_cluster(channel)
        except grpc.aio.AioRpcError:
            return wire.Cluster()

    async def look(self) -> dict[str, dict[str, str]]:
        """The ready workers of each pool, and their hosts."""
        seen = await self.view()
        ready = {
            pool.role: {
                worker.worker_id: worker.address.rpartition(":")[0]
                for worker in pool.workers
                if worker.state == "ready"
            }
            for pool in seen.pools
        }
        return {pool: ready.get(pool, {}) for pool in POOLS}

    # --- a run ------------------------------------------------------------------------------------

    async def run(self, deaths: int, limit_s: float) -> Outcome:
        """Once without deaths, then under load until there were so many, at most for `limit_s`."""
        load = make_load(self.random, count=NUM_REQUESTS, prompts=PROMPTS, outputs=OUTPUTS)
        self._clients = [Client(self) for _ in range(CLIENTS)]
        async with self.channel() as channel:
            outputs = await asyncio.gather(*(self._clients[0].ask(channel, r) for r in load))
        undisturbed = dict(zip(load, outputs, strict=True))
        assert all(len(ids) == r.max_tokens for r, ids in undisturbed.items())
        self.expected = await asyncio.to_thread(decided, str(self._baton.model), undisturbed)
        self._clients[0].arrivals.clear()
        start = self._start = time.time()
        tasks = [asyncio.create_task(client.run()) for client in self._clients]
        while self.outcome.deaths.total() < deaths and time.time() < start + limit_s:
            await self._kill_something()
            if self.outcome.wrong:
                break
            await asyncio.sleep(0.5)
        for error in await asyncio.gather(*self._repairs, return_exceptions=True):
            if error is not None:
                print(f"not repaired: {error!r}")
        self.over = True
        await asyncio.gather(*tasks)
        self.outcome.seconds = time.time() - start
        await self._check_idle()
        self._noted = -1
        await self._note_usage()
        self._sum_up()
        return self.outcome

    async def _kill_something(self) -> None:
        ready = await self.look()
        await self._note_usage()
        if "head" not in self._dying:
            self._later("head", self._hurt_head(next(self._of_head)))
        whole = [pool for pool in POOLS if len(ready[pool]) >= 2 and pool not in self._dying]
        for pool in whole:
            worker, host = self.random.choice(sorted(ready[pool].items()))
            busy = ready[pool].values()
            spare = [h for h, p in self._pool_of.items() if p == pool and h not in busy]
            deck = self._decks[pool]
            if not deck:
                deck += self.random.sample(IN_POOL_DIES, len(IN_POOL_DIES))
            # Without a machine to spare the pool would not come back soon.
            losses = ("machine vanished", "machine lost power")
            kind = next((k for k in deck if spare or k not in losses), deck[0])
            deck.remove(kind)
            self._later(pool, self._hurt(pool, worker, host, kind))

    def _later(self, place: str, work: Coroutine[Any, Any, None]) -> None:
        """Do it; nothing else dies there meanwhile."""

        async def whole() -> None:
            try:
                await work
            finally:
                self._dying.discard(place)

        self._dying.add(place)
        self._repairs.add(asyncio.create_task(whole()))

    def _count(self, kind: str) -> None:
        self.outcome.deaths[kind] += 1
        self._deaths.append((time.time(), kind))
        print(f"{self.outcome.deaths.total()}: {kind}", flush=True)

    async def _hurt(self, pool: str, worker: str, host: str, kind: str) -> None:
        machines, back_after_s = self._machines, self.random.uniform(*BACK_AFTER_S)
        self._count(kind)
        if kind == "worker killed":
            machines.signal(host, REPLICA, signal.SIGKILL)
        elif kind == "worker stood still":
            machines.signal(host, REPLICA, signal.SIGSTOP)
            await asyncio.sleep(back_after_s)
            machines.signal(host, REPLICA, signal.SIGCONT)
            worker = ""
        elif kind == "machine cut off":
            machines.pull(host)
            await asyncio.sleep(back_after_s)
            machines.plug(host)
            worker = ""
        elif kind == "worker frozen":
            frozen = machines.signal(host, REPLICA, signal.SIGSTOP)
            await self._until(lambda: not any(map(alive, frozen)), 60.0)
            for pid in frozen:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            del self._pool_of[host]
            if kind == "machine vanished":
                await asyncio.to_thread(machines.pull, host)
                await asyncio.sleep(20.0)  # it runs on, alone, until its power is cut, too
            await asyncio.to_thread(machines.remove, host)
            await asyncio.to_thread(self._add, pool)
        await self._until_whole(pool, without=worker)

    async def _hurt_head(self, kind: str) -> None:
        title = ON_HEAD_DIES[kind]
        found = self._machines.processes(HEAD, title)
        if found:
            pid = self.random.choice(found)
            self._count(kind)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if kind.endswith("frozen") else signal.SIGKILL)
            await self._until(lambda: not alive(pid), 120.0)
            await self._until(
                lambda: len(self._machines.processes(HEAD, title)) >= len(found), 120.0
            )
            await asyncio.sleep(HEAD_PAUSE_S)

    async def _until_whole(self, pool: str, *, without: str) -> None:
        """Until a pool has its workers again: not the one that has died."""
        end = time.monotonic() + 240.0
        while time.monotonic() < end:
            ready = (await self.look())[pool]
            if len(ready) >= 2 and without not in ready:
                return
            await asyncio.sleep(0.5)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not condition():
            await asyncio.sleep(0.2)

    # --- what must hold ---------------------------------------------------------------------------

    async def _check_idle(self) -> None:
        end, held = time.monotonic() + IDLE_S, ["no router answers"]
        routers: set[str] = set()
        while held and time.monotonic() < end:
            await asyncio.sleep(0.5)
            seen = await self.view()
            if not seen.routers:
                continue
            routers = {router.router_id for router in seen.routers}
            held = [
                f"{w.worker_id}: {getattr(w, name)} {name}"
                for pool in seen.pools
                for w in pool.workers
                for name in WORK
                if w.state == "ready" and getattr(w, name)
            ]
            held += [f"{r.router_id}: {r.requests} requests" for r in seen.routers if r.requests]
            held += [
                f"{p.role}: {len(p.workers)} workers" for p in seen.pools if len(p.workers) < 2
            ]
        self.outcome.left += held
        for name, text in self._errors:
            if name in routers or not text.startswith("UNAVAILABLE"):
                self.outcome.failed.append(f"{name}: {text}")
            else:
                self.outcome.lost_with_router[text] += 1

    def failed(self, router: str, text: str) -> None:
        """A request that this router had accepted has ended with an error."""
        self._errors.append((router, text))
        print(f"{time.time() - self._start:.1f} s: {router}: {text}", flush=True)

    def _sum_up(self) -> None:
        outcome = self.outcome
        arrivals: dict[str, array[float]] = {}
        for client in self._clients:
            arrivals |= client.arrivals
        outcome.resumed_s = resumptions(self._machines.logs, arrivals)
        outcome.note_pauses(arrivals.values(), self._deaths, self._start)

    async def _note_usage(self) -> None:
        """Of the services on the head, and of all workers."""
        part = self.outcome.deaths.total() // NOTE_EACH
        if part == self._noted:
            return
        self._noted = part
        places = [(HEAD, title, title) for title in ON_HEAD]
        places += [(host, REPLICA, pool) for host, pool in self._pool_of.items()]
        for host, title, name in places:
            for pid in self._machines.processes(host, title):
                if (usage := usage_of(pid)) is not None:
                    shown = f"{name.rpartition(':')[2]} {pid}"
                    self.outcome.usage.setdefault(shown, []).append(usage)


INTRO = f"""# Deaths in a cluster of several machines

Two routers, two prefill and two decode workers in float32 under Ray Serve, every worker on a
machine of its own (a network namespace), {CLIENTS} clients, half of the requests greedy, half
with a seed. Routers take a worker for lost that is silent for {SILENCE_S:g} s.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and record with `--report`; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="the record; beside it the figures as JSON")
    parser.add_argument("--sum", type=Path, nargs="+", help="figures of runs to record as one")
    args = parser.parse_args(argv)
    command = f"python -m tests.cluster.chaos --deaths {args.deaths} --seed {args.seed}"
    if args.sum:
        outcome, command = total(args.sum), f"{command} and the following seeds"
    else:
        outcome = run_chaos(args.deaths, args.limit_s, args.seed)
    text = record(outcome, command, intro=INTRO)
    print(text)
    for line in (*outcome.wrong[:3], *outcome.failed[:20]):
        print(line[:500])
    if args.report is not None:
        args.report.write_text(text)
        outcome.save(args.report.with_suffix(".json"))
    return 0 if outcome.good else 1


def run_chaos(deaths: int, limit_s: float, seed: int) -> Outcome:
    """Start the machines, run, and leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        model = chaos_model(folder / "model", max_position_embeddings=4096)
        chaos = Chaos(folder, Path(model), seed)
        try:
            chaos.start()
            return asyncio.run(chaos.run(deaths, limit_s))
        finally:
            chaos.stop()


if __name__ == "__main__":
    sys.exit(main())
