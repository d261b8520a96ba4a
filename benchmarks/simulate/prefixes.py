"""`python -m benchmarks.simulate.prefixes --trace FILE`: what KV tiers and loans bring on a trace
with shared prefixes (Mooncake's form: `hash_ids` name blocks of 512 tokens, or `--agents`).

Production schedulers, policy, tiers and loans on a virtual clock; copies and links take the time of
their bytes at rates that were measured (docs/kv-tiers.md), disks at one that is assumed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulate.__main__ import figures, percentile, slo_of, within
from benchmarks.simulate.devices import H200_8B_SERVING
from benchmarks.simulate.worker import COMMIT_S, FINGERPRINT, MESSAGE_S, Worker
from benchmarks.simulate.world import Setup, World
from cluster.bench.workload import Ask, spread_ticks
from cluster.config.load import load_config
from engine.kv.allocator import BlockAllocator
from kv_tiers.commands import Copy, CopyKind, CopyResult, Tier
from kv_transfer.control.listeners import TransferReport
from observability import metrics
from observability.metrics import counter_key
from protocol.ids import RequestKey
from protocol.messages import PrefixSource, Submit, Ticket
from router.workers.policy import WorkerView, choose_source
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.messages import (
    BlocksSafe,
    CommitHandoff,
    Committed,
    CopyDone,
    Delivered,
    FilesListed,
    Granted,
    HandoffEnded,
    Lend,
    Push,
    Reserve,
    StepOutput,
)
from worker_runtime.scheduling.peer_blocks import PeerBlocks
from worker_runtime.scheduling.prefix_cache import PrefixCache

#: Llama-3.1-8B in bfloat16.
_TOKEN_BYTES = 128 << 10
#: Bytes per second: host memory and CUDA IPC as measured on H200s, an NVMe disk as assumed.
_HOST, _LINK, _DISK = 50e9, 300e9, 5e9
_SEGMENT_BLOCKS = 8
_BLOCK_OF_TRACE = 512
_LISTED_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What is below the pools. host_bytes: of each worker."""

    host_bytes: int = 0
    disk: bool = False
    peers: bool = False


SHAPES = {
    "pools": Tiers(),
    "+ peers": Tiers(peers=True),
    "+ host": Tiers(host_bytes=64 << 30),
    "+ host, peers": Tiers(host_bytes=64 << 30, peers=True),
    "+ host, disk, peers": Tiers(host_bytes=64 << 30, disk=True, peers=True),
}


class PrefixWorld(World):
    """A world whose prompts share beginnings, and whose workers keep them."""

    def __init__(
        self, setup: Setup, asks: Sequence[Ask], prompts: Sequence[tuple[int, ...]], tiers: Tiers
    ) -> None:
        self._tiers = tiers
        self._prompts = prompts
        self._block_bytes = setup.block_size * _TOKEN_BYTES
        self._free_at: dict[tuple[str, CopyKind], float] = {}
        self._files: set[bytes] = set()
        self._loans: dict[RequestKey, tuple[Worker, Worker]] = {}
        self._granted: dict[RequestKey, int] = {}  # tokens
        self._over: set[RequestKey] = set()  # loans that were given up
        self._pushed: Counter[RequestKey] = Counter()
        self.num_cached = 0
        super().__init__(setup, asks)
        if tiers.disk:
            for second in range(1, int(asks[-1].at) + 1):
                self.clock.at(second * _LISTED_S, self._list)

    def _below(self, blocks: BlockAllocator) -> tuple[KVTiers | None, PeerBlocks | None]:
        tiers, num_slots = None, self._tiers.host_bytes // self._block_bytes
        if num_slots:
            tiers = KVTiers(
                blocks,
                num_slots=num_slots,
                slot_bytes=self._block_bytes,
                segment_blocks=_SEGMENT_BLOCKS if self._tiers.disk else 0,
            )
            tiers.costs.rates[Tier.DISK].probed(_DISK, 0.0)
        if not self._tiers.peers:
            return tiers, None
        cache = PrefixCache(blocks, fingerprint=FINGERPRINT, enabled=True, tiers=tiers)
        return tiers, PeerBlocks(cache, blocks, block_bytes=self._block_bytes, assumed=20e9)

    def _prompt(self, ask: Ask) -> tuple[int, ...]:
        return self._prompts[len(self._requests)]

    def _source(
        self, submit: Submit, computes: WorkerView, views: Sequence[WorkerView]
    ) -> PrefixSource | None:
        source = choose_source(computes, views) if self._tiers.peers else None
        if source is None:
            return None
        workers = {worker.ref: worker for worker in self.workers}
        key = submit.key.loan
        self._loans[key] = workers[source.ref], workers[computes.ref]
        ticket = Ticket(key=key, sender_epoch=0, receiver_epoch=0, num_blocks=0, lifetime_s=60.0)
        return PrefixSource(worker=source.ref, ticket=ticket, num_tokens=source.cached_tokens)

    # --- what workers do ------------------------------------------------------------------------

    def _take(self, worker: Worker, out: StepOutput) -> None:
        for events in out.events.values():
            self.num_cached += sum(prompt.num_cached_tokens for prompt in events.prompts)
        for copy in out.copies:
            self._copy(worker, copy)
        for borrow in out.borrows:
            lender, _ = self._loans[borrow.reserve.key]
            granted = self._grant(borrow.reserve)
            lend = Lend(digests=borrow.names, granted=granted)
            self.clock.after(MESSAGE_S, lender.tell, lend)
        for lent in out.lent:
            _, borrower = self._loans[lent.key]
            if lent.num_tokens < self._granted[lent.key] and lent.key not in self._over:
                self.clock.after(MESSAGE_S, borrower.tell, lent)
        for end in out.ends:
            if end.key in self._loans:
                self._end(end.key)
        self._take_loans(out)
        super()._take(worker, out)

    def _take_loans(self, out: StepOutput) -> None:
        """Grants and sends of loans, which the rest of the world does not know."""
        for reserve in [reserve for reserve in out.reserves if reserve.key in self._loans]:
            out.reserves.remove(reserve)
            lender, granted = self._loans[reserve.key][0], self._grant(reserve)
            self.clock.after(MESSAGE_S, lender.tell, granted)
        for send in [send for send in out.sends if send.key in self._loans]:
            out.sends.remove(send)
            if isinstance(send, Push):
                self._pushed[send.key] += len(send.block_ids)
            elif isinstance(send, CommitHandoff):
                seconds = self._pushed.pop(send.key) * self._block_bytes / _LINK
                self.clock.after(seconds + COMMIT_S, self._lent, send.key)
            else:
                self._end(send.key)

    def _grant(self, reserve: Reserve) -> Granted:
        self._granted[reserve.key] = reserve.num_tokens
        cached = reserve.num_cached_blocks * self._setup.block_size
        return Granted(key=reserve.key, num_cached_tokens=cached, num_tokens=reserve.num_tokens)

    def _copy(self, worker: Worker, copy: Copy) -> None:
        """Each kind of copy has a thread of its own."""
        to_disk = copy.kind in (CopyKind.READ, CopyKind.WRITE)
        num_bytes = len(copy.slots) * self._block_bytes
        seconds = num_bytes / (_DISK if to_disk else _HOST)
        name = worker.ref.worker_id, copy.kind
        ends = max(self.clock.now, self._free_at.get(name, 0.0)) + seconds
        self._free_at[name] = ends
        if copy.kind is CopyKind.WRITE:
            self._files.add(copy.name)
        result = CopyResult(ok=True, num_bytes=num_bytes, seconds=seconds)
        self.clock.at(ends, worker.tell, CopyDone(number=copy.number, result=result))

    def _list(self) -> None:
        for worker in self.workers:
            worker.tell(FilesListed(names=frozenset(self._files)))

    def _lent(self, key: RequestKey) -> None:
        if key in self._over:
            return
        lender, borrower = self._loans[key]
        borrower.tell(Committed(key=key, tokens=()))
        now = self.clock.now
        report = TransferReport(start=now, end=now, num_bytes=0, num_pieces=0)
        lender.tell(Delivered(key=key, report=report))

    def hits(self, total: int) -> str:
        """The share of prompt tokens that were not computed, and what of it came from each lower
        tier."""
        counters: Counter[str] = Counter()
        for worker in self.workers:
            counters.update(worker.snapshot().counters)
        shares = {"cached": self.num_cached / total}
        for tier in (Tier.HOST, Tier.DISK, Tier.PEER):
            key = counter_key(metrics.KV_TIER_HITS, tier=tier.value)
            shares[tier.value] = counters[key] / total
        return " ".join(f"{name} {share:6.1%}" for name, share in shares.items())

    def _end(self, key: RequestKey) -> None:
        if key in self._over:
            return
        self._over.add(key)
        lender, borrower = self._loans[key]
        self.clock.after(MESSAGE_S, lender.tell, HandoffEnded(key=key, error=None))
        self.clock.after(MESSAGE_S, borrower.tell, BlocksSafe(key=key))


def read_prefixes(path: Path, limit: int) -> tuple[list[Ask], list[tuple[int, ...]]]:
    """Requests of a trace in Mooncake's form, and prompts that share what its ids say."""
    asks, prompts = [], []
    with path.open() as file:
        rows = [json.loads(line) for line in file][:limit]
    for row in rows:
        ids = [
            token
            for name in row["hash_ids"]
            for token in range(name * _BLOCK_OF_TRACE, (name + 1) * _BLOCK_OF_TRACE)
        ]
        prompts.append(tuple(ids[: row["input_length"]]))
        asks.append(
            Ask(
                at=row["timestamp"] / 1000,
                prompt_tokens=len(prompts[-1]),
                output_tokens=max(1, row["output_length"]),
            )
        )
    return asks, prompts


def agents(count: int, rng: random.Random) -> tuple[list[Ask], list[tuple[int, ...]]]:
    """Agents that work on tasks: a common system prompt, a task, then turns of a call of a tool and
    its result, whose prompt is all that came before."""
    system = list(range(4096))
    found: list[tuple[float, tuple[int, ...], int]] = []
    fresh = 1 << 20
    for _ in range(count):
        at, history = rng.uniform(0, 300), list(system)
        for turn in range(rng.randint(6, 20)):
            num_new = rng.randint(2000, 8000) if turn == 0 else rng.randint(200, 1500)
            history += range(fresh, fresh + num_new)
            fresh += num_new
            num_output = rng.randint(30, 200)
            found.append((at, tuple(history), num_output))
            history += [7] * num_output  # as the simulated model says
            at += num_output * 0.02 + rng.expovariate(1 / 8)
    found.sort(key=lambda each: each[0])
    asks = [
        Ask(at=at, prompt_tokens=len(prompt), output_tokens=output) for at, prompt, output in found
    ]
    return asks, [prompt for _, prompt, _ in found]


def main() -> None:
    """Print a line for each set of tiers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.prefixes")
    parser.add_argument("--config", type=Path, default=Path("deploy/configs/gpu-1p1d.yaml"))
    parser.add_argument("--trace", type=Path, help="default: agents that are made up")
    parser.add_argument("--limit", type=int, default=400, help="requests, or agents")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--pool-tokens", type=int, default=400_000, help="of each worker")
    parser.add_argument("--slo", default="1000/50", help="TTFT/TPOT in ms")
    options = parser.parse_args()
    if options.trace is None:
        asks, prompts = agents(options.limit, random.Random(1))
    else:
        asks, prompts = read_prefixes(options.trace, options.limit)
        asks = spread_ticks(asks)
    asks = [replace(ask, at=ask.at / options.speed) for ask in asks]
    config = load_config(options.config).config
    setup = Setup(
        step_time=H200_8B_SERVING,
        num_prefill=options.prefill,
        num_decode=options.decode,
        prefill=config.prefill.worker,
        decode=config.decode.worker,
        router=config.router.settings,
        num_blocks=options.pool_tokens // 32,
    )
    total, slo = sum(ask.prompt_tokens for ask in asks), slo_of(options.slo)
    print(f"{len(asks)} requests, {total} prompt tokens, {asks[-1].at:.0f} s")
    for name, tiers in SHAPES.items():
        world = PrefixWorld(setup, asks, prompts, tiers)
        requests = world.run()
        rows = [figures(request) for request in requests]
        ttft = "/".join(f"{1000 * percentile([r[0] for r in rows], p):.0f}" for p in (50, 90, 99))
        good = sum(within(row, slo) for row in rows)
        print(f"{name:20} {world.hits(total)}  TTFT {ttft} ms  good {good}", flush=True)


if __name__ == "__main__":
    main()
