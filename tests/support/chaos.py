"""A cluster of processes under full load with a fault every second.

    python -m tests.support.chaos --seconds 600 --report benchmarks/results/chaos.md

Two processes, each with a prefill and a tensor-parallel decode worker, hand KV to each other over
TCP, behind a real router, over pools, host memory and files that do not hold what is asked. Every
second a transfer or a loan is killed, files of KV are damaged, a process is frozen for a while, or
one is killed and replaced. Every request must end as it does without faults; afterwards no request,
block, copy or lease of host memory may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import grpc

from protocol.ids import WorkerRef
from router.config import RouterConfig
from router.server import Router
from tests.support import services
from tests.support.chaos_host import (
    DISK_BYTES,
    SECRET,
    follower_process,
    host_process,
    kv_folder,
)
from tests.support.chaos_load import (
    LoadRequest,
    chaos_model,
    decided,
    make_load,
    page,
    table,
    usage_table,
)
from tests.support.processes import Child

#: However busy the machine is.
ANSWER_S = 60.0
START_S = 200.0
CLIENTS = 24
NUM_REQUESTS = 48
#: Lengths around those of blocks and chunks.
PROMPTS = (1, 15, 16, 17, 31, 32, 33, 64, 65, 100, 200, 300)
OUTPUTS = (1, 2, 16, 40, 80)


class HostHandle:
    """The supervisor's end of one host and its follower."""

    def __init__(self, number: int, model: str) -> None:
        self._number = number
        self._model = model
        self.refs: tuple[WorkerRef, ...] = ()
        self.processes: list[Child] = []

    async def start(self) -> None:
        """Start both processes; returns when both workers are ready."""
        host = Child(host_process, self._number, self._model)
        self.processes = [host]
        async with asyncio.timeout(START_S):
            invite = await asyncio.wrap_future(host.told("invite"))
            self.processes.append(Child(follower_process, self._number, self._model, invite))
            self.refs = await asyncio.wrap_future(host.told("ready"))

    async def do(self, name: str, *args: Any) -> Any:
        """Run a command in the host."""
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.wrap_future(self.processes[0].start(name, *args))

    async def kill(self) -> None:
        """Kill the host and wait until both processes have ended."""
        host, follower = self.processes
        host.signal(signal.SIGKILL)
        for process in self.processes:
            process.thaw()
        await asyncio.to_thread(host.process.join, 60)
        # The follower must detect the loss by itself.
        await asyncio.to_thread(follower.process.join, 60)
        assert follower.process.exitcode is not None, "a follower outlived its rank 0"


@dataclass
class Outcome:
    """The result of a run."""

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    left: list[str] = field(default_factory=list)
    usage: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        return not (self.wrong or self.failed or self.left)


class Chaos:
    """A router in this process, two hosts beside it."""

    def __init__(
        self, model: str, seed: int, *, period_s: float, request_s: float, min_events: int
    ) -> None:
        self._model = model
        self._min_events = min_events
        self._period_s = period_s
        self._request_s = request_s
        self._random = random.Random(seed)
        self.outcome = Outcome()
        self.hosts = [HostHandle(number, model) for number in range(2)]
        self._healthy: set[int] = set()
        self._repairs: set[asyncio.Task[None]] = set()
        self._expected: dict[LoadRequest, Sequence[int]] = {}

    async def start(self) -> None:
        self._router = Router(
            RouterConfig(
                model_path=self._model,
                served_model_name="tiny",
                local_prefill_tokens=0,
                max_attempts=1000,
                local_gain_s=0.1,  # prompts that wait change their worker
                resume_wait_s=self._request_s,
                silence_s=2.0,
                submit_timeout_s=2.0,
            ),
            secret=SECRET,
        )
        addresses = await self._router.start(
            http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0
        )
        self._channel = grpc.aio.insecure_channel(addresses.grpc)
        self._stub = services.InferenceStub(self._channel)
        await asyncio.gather(*(host.start() for host in self.hosts))
        self._healthy = {0, 1}
        self._announce()
        async with asyncio.timeout(START_S):
            while not self._router.ready:
                await asyncio.sleep(0.02)

    def _announce(self) -> None:
        refs = [ref for n in sorted(self._healthy) for ref in self.hosts[n].refs]
        self._router.set_workers(refs)

    async def ask(self, sent: LoadRequest) -> list[int]:
        ids: list[int] = []
        async for message in self._stub.Generate(sent.message(), timeout=self._request_s):
            for choice in message.choices:
                ids.extend(choice.token_ids)
        return ids

    async def run(self, seconds: float) -> Outcome:
        """Run the load once without faults, then with faults for `seconds`; check for leftovers."""
        load = make_load(self._random, count=NUM_REQUESTS, prompts=PROMPTS, outputs=OUTPUTS)
        outputs = await asyncio.gather(*map(self.ask, load))
        undisturbed = dict(zip(load, outputs, strict=True))
        self._expected = await asyncio.to_thread(decided, self._model, undisturbed)
        assert len({tuple(output) for output in self._expected.values()}) > NUM_REQUESTS // 2
        await self._note_usage()
        start = time.monotonic()
        end = start + seconds
        clients = [asyncio.create_task(self._client(end)) for _ in range(CLIENTS)]
        disturbing = asyncio.create_task(self._disturb(end))
        noting = asyncio.create_task(self._keep_noting(seconds / 10))
        await asyncio.gather(*clients, disturbing)
        noting.cancel()
        await asyncio.gather(*self._repairs)
        self.outcome.seconds = time.monotonic() - start
        await self._check_idle()
        await self._note_usage()
        return self.outcome

    def _over(self, end: float) -> bool:
        """Whether time is up and enough events happened, or something went wrong."""
        outcome = self.outcome
        happened = min(outcome.requests, outcome.faults.total()) >= self._min_events
        return time.monotonic() >= end and (happened or not outcome.good)

    async def _client(self, end: float) -> None:
        while not self._over(end):
            sent = self._random.choice(list(self._expected))
            began = time.monotonic()
            try:
                ids = await self.ask(sent)
            except grpc.aio.AioRpcError as error:
                self.outcome.failed.append(f"{error.code().name}: {error.details()}")
                continue
            self.outcome.slowest_s = max(self.outcome.slowest_s, time.monotonic() - began)
            self.outcome.requests += 1
            self.outcome.tokens += len(ids)
            if ids != self._expected[sent]:
                self.outcome.wrong.append(f"{sent}: {ids}")

    # --- disturbances ---------------------------------------------------------------------------

    async def _disturb(self, end: float) -> None:
        round_number = 0
        while not self._over(end):
            await asyncio.sleep(self._period_s)
            round_number += 1
            number = self._random.choice(sorted(self._healthy)) if self._healthy else 0
            if len(self._healthy) < 2:
                await self._kill_a_transfer(number)
            elif round_number % 20 == 0:
                self._later(self._kill(number))
            elif round_number % 5 == 0:
                self._later(self._freeze(number))
            elif round_number % 5 == 2:
                self._spoil_files()
            else:
                await self._kill_a_transfer(number)

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._repairs.add(task)

    async def _kill_a_transfer(self, number: int) -> None:
        if number not in self._healthy:
            return
        how = self._random.choice(["cut", "cut", "give_up"])
        for _ in range(50):  # until one is under way
            try:
                if await self.hosts[number].do(how):
                    self.outcome.faults[f"transfer: {how}"] += 1
                    return
            except (TimeoutError, BrokenPipeError, OSError):
                return
            await asyncio.sleep(0.01)

    def _spoil_files(self) -> None:
        """Damage all KV files while workers read and write them, or delete their folder."""
        how = self._random.choice(["flip", "truncate", "delete"])
        folder = Path(kv_folder(self._model))
        self.outcome.faults[f"KV files: {how}"] += 1
        if how == "delete":
            shutil.rmtree(folder, ignore_errors=True)
        for path in folder.glob("*/*.kv"):
            with suppress(FileNotFoundError), path.open("r+b") as file:  # evicted meanwhile
                place = self._random.randrange(1 + file.seek(0, os.SEEK_END))
                if how == "truncate":
                    file.truncate(place)
                    continue
                file.seek(place)
                byte = file.read(1) or b"\0"  # behind the last: one too many
                file.seek(place)
                file.write(bytes([byte[0] ^ 1]))

    async def _freeze(self, number: int) -> None:
        """Freeze a host or its follower for less or more than the timeouts."""
        which, pause = self._random.choice([0, 1]), self._random.choice([0.3, 1.0, 4.0])
        self._healthy.discard(number)
        self.outcome.faults[f"freeze {['host', 'rank 1'][which]}, {pause} s"] += 1
        host = self.hosts[number]
        host.processes[which].freeze()
        try:
            if pause > 2.0:
                await asyncio.sleep(3.0)
                await self._tell_left(number)
                await asyncio.sleep(pause - 3.0)
            else:
                await asyncio.sleep(pause)
        finally:
            host.processes[which].thaw()
        try:
            await host.do("health")
        except Exception:  # noqa: BLE001 - broken, or it does not answer: it is replaced
            await self._replace(number)
            return
        self._healthy.add(number)

    async def _kill(self, number: int) -> None:
        which = self._random.choice([0, 1])
        self._healthy.discard(number)
        self.outcome.faults[f"kill {['host', 'rank 1'][which]}"] += 1
        self.hosts[number].processes[which].signal(signal.SIGKILL)
        await self._replace(number)

    async def _replace(self, number: int) -> None:
        """Replace a broken worker as a cluster does."""
        self._announce()
        await self._tell_left(number)
        await self.hosts[number].kill()
        self.hosts[number] = HostHandle(number, self._model)
        await self.hosts[number].start()
        self._healthy.add(number)
        self._announce()
        self.outcome.faults["replaced"] += 1

    async def _tell_left(self, number: int) -> None:
        epochs = frozenset(ref.epoch for ref in self.hosts[number].refs)
        for other in self._healthy - {number}:
            await self.hosts[other].do("peers_left", epochs)
            await self.hosts[other].do("health")  # the loss of one host must not break the other

    # --- what must hold -------------------------------------------------------------------------

    async def _keep_noting(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self._note_usage()

    async def _note_usage(self) -> None:
        for number in sorted(self._healthy):
            try:
                usage = await self.hosts[number].do("usage")
            except (TimeoutError, BrokenPipeError, OSError):
                continue
            pid = self.hosts[number].processes[0].process.pid
            self.outcome.usage.setdefault(f"host {number} pid {pid}", []).append(asdict(usage))

    async def _check_idle(self) -> None:
        left = self.outcome.left
        for host in self.hosts:
            await host.do("health")  # a broken engine keeps blocks: report it first
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            statuses = [s for host in self.hosts for s in await host.do("loads")]
            held = [_held(status) for status in statuses]
            if not any(held) and self._router.num_requests == 0:
                held = [text for host in self.hosts for text in await host.do("unsettled")]
                if not held:
                    break
            await asyncio.sleep(0.1)
        else:
            left += [text for text in held if text]
        if (size := _size_of(kv_folder(self._model))) > 1.5 * DISK_BYTES:  # counted now and then
            left.append(f"{size} bytes of KV files")
        if self._router.num_requests:
            left.append(f"router: {self._router.num_requests} requests")
        for status in statuses:
            for name, value in status.counters.items():
                self.outcome.counters[f"{status.ref.role} {name}"] += value

    async def stop(self) -> None:
        """End everything; whatever outlives it is left behind."""
        await self._channel.close()
        await self._router.stop()
        for host in self.hosts:
            await host.kill()


def _size_of(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*/*"))


def _held(status: Any) -> str:
    load = status.load
    counts = (load.running, load.waiting, load.held_blocks, load.quarantined_blocks)
    names = ("running", "waiting", "held", "quarantined")
    found = [f"{count} {name}" for name, count in zip(names, counts, strict=True) if count]
    return f"{status.ref.worker_id}: {', '.join(found)}" if found else ""


async def run_chaos(
    model: str,
    seconds: float,
    *,
    seed: int = 0,
    period_s: float = 1.0,
    request_s: float = 90.0,
    min_events: int = 0,
) -> Outcome:
    """One run with a fault every `period_s`; every request must end within `request_s`. Continues
    after `seconds` until `min_events` requests have completed and as many faults happened."""
    chaos = Chaos(model, seed, period_s=period_s, request_s=request_s, min_events=min_events)
    try:
        await chaos.start()
        return await chaos.run(seconds)
    finally:
        await chaos.stop()


def record(outcome: Outcome, command: str) -> str:
    """The record of a run."""
    text = f"""# Chaos on one machine without a GPU

Two processes, each with a prefill worker and a tensor-parallel decode worker (two ranks), hand over
to each other over TCP, blocks of 32 tokens on the one side and 16 on the other, behind a real
router with {CLIENTS} clients, over pools, host memory and files that do not hold what is asked.
Something breaks every second.
"""
    figures = table(
        ["what", "value"],
        [
            ["seconds", f"{outcome.seconds:.0f}"],
            ["requests completed", f"{outcome.requests} ({outcome.tokens} tokens)"],
            ["outputs that differ from the undisturbed run", len(outcome.wrong)],
            ["requests that failed", len(outcome.failed)],
            ["slowest request", f"{outcome.slowest_s:.1f} s"],
            ["left at the end (requests, blocks, copies, leases)", outcome.left or "nothing"],
        ],
    )
    faults = table(["disturbance", "times"], sorted(outcome.faults.items()))
    tiers = table(
        ["KV tiers of the workers at the end", ""],
        [each for each in sorted(outcome.counters.items()) if "kv_tier_" in each[0] and each[1]],
    )
    return page(text, [figures, faults, tiers, usage_table(outcome.usage)], command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and record with `--report`; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--request-seconds", type=float, default=90.0)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = run_chaos(
            chaos_model(Path(folder)),
            args.seconds,
            seed=args.seed,
            request_s=args.request_seconds,
        )
        outcome = asyncio.run(run)
    command = f"python -m tests.support.chaos --seconds {args.seconds:g} --seed {args.seed}"
    text = record(outcome, command)
    print(text)
    for line in (*outcome.wrong[:5], *outcome.failed[:20]):
        print(line)
    if args.report is not None:
        args.report.write_text(text)
        figures = {f.name: getattr(outcome, f.name) for f in fields(outcome)}
        args.report.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if outcome.good else 1


if __name__ == "__main__":
    sys.exit(main())
