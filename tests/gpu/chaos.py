"""Pairs of workers on GPUs that hand over at full load while transfers are killed.

    python -m tests.gpu.chaos --pairs 0,1:2,3 2,3:0,1 --backend nccl --seconds 120 --out chaos.json

Each pair is a prefill worker on the GPUs before the colon and a decode worker on those behind it,
tensor parallel when they are several, each rank a process of its own. Two pairs that run against
each other move KV both ways while they decode. First every request runs undisturbed; then, about
every second, a fault hits a random transfer: its request is cancelled, one end gives it up, the
links of a rank break, or a worker takes its peer for lost. Requests that fail are resumed with what
they had, as a router does. With `--host-mib`, prefixes are cached, and pools that are too small for
them (`--blocks`) leave them to host memory.

At the end every answer must be that of the undisturbed run, every worker idle with all blocks free,
and neither threads nor memory may have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine.config import EngineConfig
from kv_tiers.config import TierConfig
from kv_transfer.config import BackendName, TransferConfig
from protocol.errors import BatonError
from protocol.ids import RequestKey, Role
from protocol.sampling import SamplingParams
from tests.gpu.chaos_worker import PATIENCE_S, Process
from tests.support.pair import SCHEDULERS, SECRET, FakeRouter
from tests.support.tiny import save_tiny_llama
from worker_runtime.config import WorkerConfig
from worker_runtime.worker import WorkerSettings

MARGIN = 1e-3
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
}


@dataclass(frozen=True)
class Request:
    """One question and where it goes."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    pair: int


@dataclass
class Tally:
    """What happened."""

    answers: int = 0
    tokens: int = 0
    resumed: int = 0
    wrong: list[tuple[int, int]] = field(default_factory=list)  # request, first wrong token
    faults: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


class Run:
    """Workers, and the router in front of them."""

    def __init__(self, processes: list[Process], args: argparse.Namespace) -> None:
        self.processes = processes
        self.prefills = [p for p in processes if p.role is Role.PREFILL]
        self.decodes = [p for p in processes if p.role is Role.DECODE]
        self.args = args
        self.router = FakeRouter()
        self.random = random.Random(args.seed)
        self.requests = [self._request(i) for i in range(args.requests)]
        self.live: dict[RequestKey, Request] = {}
        self.tally = Tally()

    def _request(self, index: int) -> Request:
        length = self.random.randint(self.args.shortest, self.args.longest)
        prompt = tuple(self.random.randrange(SHAPE["vocab_size"]) for _ in range(length))
        kind = {"temperature": 0.0} if index % 2 else {"temperature": 1.0, "seed": index}
        sampling = SamplingParams(**kind, max_tokens=self.args.max_tokens, ignore_eos=True)
        return Request(prompt, sampling, index % len(self.prefills))

    async def answer(self, request: Request) -> list[int]:
        """All of its tokens, resumed as often as it takes."""
        began = time.monotonic()
        output: list[int] = []
        while len(output) < self.args.max_tokens:
            prefill, decode = self.prefills[request.pair].ref, self.decodes[request.pair].ref
            sampling = request.sampling
            try:
                key = await self.router.submit(
                    request.prompt, sampling, decode, prefill, output=tuple(output)
                )
            except BatonError as error:
                self.tally.failures[f"submit: {error.code.value}"] += 1
                await asyncio.sleep(0.05)
                continue
            self.live[key] = request
            try:
                got = await self.router.answer(key, PATIENCE_S)
            finally:
                del self.live[key]
            first = len(output)
            while len(output) in got.tokens:
                output.append(got.tokens[len(output)])
            assert not got.tokens or min(got.tokens) >= first
            if len(output) < self.args.max_tokens:
                self.tally.resumed += 1
                for failure in got.failures:
                    self.tally.failures[failure.error.code.value] += 1
                await self.router.cancel(key, prefill, decode)
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - began)
        self.tally.answers += 1
        self.tally.tokens += len(output)
        return output

    async def clear(self) -> list[int]:
        """The requests that rounding cannot decide: everywhere in a greedy answer the best token
        is ahead of the next by MARGIN. Sums in another order, in batches of another shape, move
        logits by a hundredth of that."""
        turns = asyncio.Semaphore(self.args.concurrency)

        async def margin(request: Request) -> float:
            if request.sampling.temperature:
                return MARGIN  # unknown: noise decides with the logits
            prefill, decode = self.prefills[request.pair].ref, self.decodes[request.pair].ref
            async with turns:
                logged = replace(request.sampling, logprobs=2)
                key = await self.router.submit(request.prompt, logged, decode, prefill)
                got = await self.router.answer(key, PATIENCE_S)
            tops = [at.top_logprobs for at in got.logprobs.values()]
            return min(first - second for first, second in tops)

        margins = await asyncio.gather(*(margin(request) for request in self.requests))
        return [index for index, each in enumerate(margins) if each >= MARGIN]

    async def undisturbed(self) -> list[list[int]]:
        """Every answer, several at a time."""
        turns = asyncio.Semaphore(self.args.concurrency)

        async def one(request: Request) -> list[int]:
            async with turns:
                return await self.answer(request)

        return list(await asyncio.gather(*(one(request) for request in self.requests)))

    async def chaos(self, expected: list[list[int]], stable: list[int]) -> None:
        """Load until the time is over, and faults beside it."""
        end = time.monotonic() + self.args.seconds

        async def client(number: int) -> None:
            own = random.Random(number)
            while time.monotonic() < end:
                index = own.choice(stable)
                got = await self.answer(self.requests[index])
                parting = first_difference(expected[index], got)
                if parting is not None:
                    self.tally.wrong.append((index, parting))

        faults = asyncio.create_task(self._faults(end))
        async with asyncio.timeout(self.args.seconds + 3 * PATIENCE_S):
            await asyncio.gather(*(client(n) for n in range(self.args.concurrency)))
        await faults

    async def _faults(self, end: float) -> None:
        shown = time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(self.random.uniform(0.5, 1.5) * self.args.pause)
            self.tally.faults[await self._fault()] += 1
            if time.monotonic() > shown + 20:
                shown = time.monotonic()
                print(f"{self.tally.answers} answers, faults {dict(self.tally.faults)}", flush=True)

    async def _fault(self) -> str:
        pair = self.random.randrange(len(self.prefills))
        prefill, decode = self.prefills[pair], self.decodes[pair]
        one, other = self.random.sample([prefill, decode], 2)
        kind = self.random.choice(["cancel", "give up", "give up", "snap", "snap", "lose"])
        if kind == "cancel" and self.live:
            key = self.random.choice(list(self.live))
            await self.router.cancel(key, *self.random.sample([prefill.ref, decode.ref], 2))
            self.router.answers[key].done.set()
            return "cancelled"
        if kind == "snap":
            return str(await one.do("snap", prefill.ref.epoch, decode.ref.epoch))
        if kind == "lose":
            return str(await one.do("lose", other.ref.epoch))
        return f"{one.role} {await one.do('give_up')}"

    async def figures(self) -> list[dict[str, Any]]:
        """Of every worker, once it is idle."""
        for _ in range(200):
            found = [await process.do("figures") for process in self.processes]
            if not any(any(each["left"]) for each in found):
                break
            await asyncio.sleep(0.1)
        return found


def first_difference(expected: list[int], got: list[int]) -> int | None:
    """Where two answers of one length part."""
    pairs = enumerate(zip(expected, got, strict=True))
    return next((at for at, (one, other) in pairs if one != other), None)


def settings_for(
    args: argparse.Namespace, role: Role, pair: int, gpus: list[str], model: str
) -> WorkerSettings:
    return WorkerSettings(
        worker_id=f"{role}-{pair}",
        role=role,
        schedulers=SCHEDULERS,
        engine=EngineConfig(
            model_path=model,
            dtype=args.dtype,
            device=args.device,
            tp_size=len(gpus),
            num_blocks=args.blocks,
            num_threads=1 if args.device == "cpu" else None,
            max_step_tokens=args.step,
        ),
        worker=WorkerConfig(
            max_num_seqs=32,
            max_num_batched_tokens=args.step,
            enable_prefix_caching=args.host_mib > 0,
        ),
        transfer=TransferConfig(
            backend=BackendName(args.backend),
            op_timeout_s=5,
            connect_timeout_s=10,
            lease_s=30,
            rpc_timeout_s=2,
            repair_s=2,
            staging_bytes=args.staging_mib << 20,
        ),
        tiers=TierConfig(host_bytes=args.host_mib << 20),
        secret=SECRET,
    )


async def run(args: argparse.Namespace) -> dict[str, Any]:
    model = save_tiny_llama(args.folder, **SHAPE)
    processes = []
    for number, pair in enumerate(args.pairs):
        for role, text in zip((Role.PREFILL, Role.DECODE), pair.split(":"), strict=True):
            gpus = text.split(",")
            settings = settings_for(args, role, number, gpus, model)
            processes.append(Process(role, settings, gpus))
    try:
        return await run_with(processes, args)
    finally:
        for process in processes:
            process.kill()


async def run_with(processes: list[Process], args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    refs = await asyncio.gather(*(process.do("start") for process in processes))
    for process, ref in zip(processes, refs, strict=True):
        process.ref = ref
    world = Run(processes, args)
    for prefill, decode in zip(world.prefills, world.decodes, strict=True):
        await prefill.do("meet", decode.ref)
    for ref in refs:
        await world.router.watch(ref)
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    expected = await world.undisturbed()
    again = await world.undisturbed()
    clear = await world.clear()
    stable = [i for i in clear if expected[i] == again[i]]
    before = await world.figures()
    world.tally = Tally()
    print(f"{len(stable)} of {len(clear)} clear answers came twice alike", flush=True)
    began = time.monotonic()
    await world.chaos(expected, stable)
    took = time.monotonic() - began
    last = Tally()
    tally, world.tally = world.tally, last
    after_all = await world.undisturbed()
    wrong_after = [i for i in stable if after_all[i] != expected[i]]
    after = await world.figures()
    exits = [await process.do("stop") for process in processes]
    await world.router.close()
    handed = [each["stats"] for each in after if each["stats"]]
    return {
        "seconds": round(took, 1),
        "answers": tally.answers,
        "tokens": tally.tokens,
        "resumed": tally.resumed,
        "faults": dict(tally.faults),
        "failures": dict(tally.failures),
        "slowest_s": round(tally.slowest_s, 2),
        "wrong": tally.wrong,
        "wrong_after": wrong_after,
        "distinct": len(stable),
        "near_ties": len(expected) - len(clear),
        "unstable": len(clear) - len(stable),
        "handoffs": handed,
        "before": [{k: v for k, v in each.items() if k != "stats"} for each in before],
        "after": [{k: v for k, v in each.items() if k != "stats"} for each in after],
        "followers": exits,
        "whole": not tally.wrong
        and not wrong_after
        and not any(any(each["left"]) for each in after),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", nargs="+", default=["0,1:2,3", "2,3:0,1"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="cuda_ipc")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--shortest", type=int, default=200)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--step", type=int, default=2048)
    parser.add_argument("--staging-mib", type=int, default=32)
    parser.add_argument("--host-mib", type=int, default=0, help="KV below the pools; 0: no cache")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/baton-chaos"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = asyncio.run(run(args))
    text = json.dumps({"args": {k: str(v) for k, v in vars(args).items()}} | result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0 if result["whole"] else 1


if __name__ == "__main__":
    sys.exit(main())
