"""What a router pays for each request and report with many workers: the choice of a pair, the look
before a request is queued, and the memory of what it knows of prefix caches."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

from observability.export import MetricSet
from protocol.ids import Role, WorkerRef
from protocol.kv_layout import CacheChange, KVFingerprint, KVLayout, hints
from protocol.messages import EventBatch, WorkerLoad, WorkerStatus
from protocol.states import WorkerState
from router.admission.load_estimate import QueuedRequest
from router.admission.queue import AdmissionQueue, AdmissionTicket
from router.auth.keys import ANYONE, ServiceTier
from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.workers.bookkeeping import PromptBlocks
from router.workers.hint_set import HintSet
from router.workers.policy import Need
from router.workers.worker_client import WorkerClient
from router.workers.worker_set import WorkerSet

#: Blocks of 16 tokens of a pool of a million tokens.
POOL_BLOCKS = 62_500
PROMPT_TOKENS = 2048
SHARED_TOKENS = 512  # the first ones of every prompt, which a tenth of the workers has
FINGERPRINT = KVFingerprint(
    model="m", weights="0", num_layers=32, num_kv_heads=8, head_dim=128, dtype="bf16", rope="r"
)
LAYOUT = KVLayout(
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_size=16,
    num_blocks=POOL_BLOCKS,
    rank_heads=((0, 8),),
)


class ConnectedStub(WorkerClient):
    """Counts as connected; nothing is at the other end."""

    async def _run(self) -> None:
        await asyncio.Event().wait()

    async def hear(self, load: WorkerLoad, cache: CacheChange | None = None) -> None:
        """As if the worker had reported."""
        state = WorkerState.READY
        await self._take(
            EventBatch(
                epoch=self.ref.epoch, role=self.ref.role, state=state, load=load, cache=cache
            )
        )


def some_load(rng: random.Random, role: Role) -> WorkerLoad:
    prefill = role is Role.PREFILL
    return WorkerLoad(
        running=rng.randrange(64),
        waiting=rng.randrange(4),
        waiting_tokens=rng.randrange(20_000) if prefill else 0,
        free_blocks=rng.randrange(POOL_BLOCKS),
        total_blocks=POOL_BLOCKS,
        tokens_per_second=20_000.0 if prefill else 2000.0,
        decode_step_s=0.0 if prefill else 0.02,
    )


class Crowd:
    """A router's workers, queue and dispatcher, without front ends."""

    def __init__(self, num_each: int) -> None:
        self.rng = random.Random(1)
        config = RouterConfig(model_path="m")
        self.workers = WorkerSet(router_id="r", secret=b"s", config=config)
        metric_set = MetricSet(model_name="m")
        self.queue = AdmissionQueue(
            workers=self.workers, config=config, metric_set=metric_set, clock=time.time
        )
        self.dispatcher = Dispatcher(
            router_id="r",
            workers=self.workers,
            secret=b"s",
            config=config,
            metric_set=metric_set,
            clock=time.time,
            rng=self.rng,
        )
        self.refs = [
            WorkerRef(worker_id=f"{role}-{n}", epoch=1 + n, role=role, address="")
            for role in Role
            for n in range(num_each)
        ]
        self.clients: list[ConnectedStub] = []
        self._config = config

    async def join(self) -> None:
        """All at once, as after a router's start; a tenth has the beginning of every prompt."""
        shared = hints(_digests(SHARED_TOKENS))
        for ref in self.refs:
            client = ConnectedStub(
                ref,
                router_id="r",
                secret=b"s",
                config=self._config,
                on_change=self.workers._on_change,
                on_report=lambda: self.workers.on_report(),
                on_mark=self.workers._holders.note,
            )
            client.status = WorkerStatus(
                ref=ref,
                state=WorkerState.READY,
                role=ref.role,
                load=WorkerLoad(),
                layout=LAYOUT,
                fingerprint=FINGERPRINT,
                max_model_len=131_072,
                max_prompt_tokens=131_072,
                steps=0,
                last_step_age_s=0.0,
            )
            self.workers._clients[ref.worker_id, ref.epoch] = client
            self.clients.append(client)
        for number, client in enumerate(self.clients):
            added = shared if number % 10 == 0 else b""
            change = CacheChange(reset=True, added=added + self.rng.randbytes(8 * 1000))
            await client.hear(some_load(self.rng, client.ref.role), change)

    def prompt(self) -> PromptBlocks:
        own = [self.rng.randrange(100_000) for _ in range(PROMPT_TOKENS - SHARED_TOKENS)]
        return PromptBlocks([*range(SHARED_TOKENS), *own])

    def ticket(self) -> AdmissionTicket:
        now = time.time()
        request = QueuedRequest(
            caller=ANYONE,
            tier_name="default",
            tier=ServiceTier(),
            priority=0,
            arrival=now,
            deadline=now + 600,
            tokens=PROMPT_TOKENS,
            largest=PROMPT_TOKENS,
            work=PROMPT_TOKENS,
        )
        return AdmissionTicket(self.queue, request)

    def enter(self) -> None:
        ticket = self.ticket()
        ticket.released = asyncio.get_running_loop().create_future()
        self.queue.enter(ticket)


def _digests(num_tokens: int) -> list[bytes]:
    blocks = PromptBlocks(range(num_tokens)).hints(FINGERPRINT, LAYOUT.block_size)
    return [block.to_bytes(8, "little") for block in blocks]


def _timed(work: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of CPU of each call, which other processes do not lengthen."""
    found = []
    for _ in range(count):
        start = time.thread_time()
        work()
        found.append((time.thread_time() - start) * 1000)
    return sorted(found)


async def measure(num_each: int, count: int = 300) -> dict[str, tuple[float, float]]:
    """Median and 99th percentile, in milliseconds of CPU, of each operation."""
    crowd = Crowd(num_each)
    await crowd.join()
    found: dict[str, list[float]] = {}
    prompts = [crowd.prompt() for _ in range(count)]
    for prompt in prompts:
        prompt.hints(FINGERPRINT, LAYOUT.block_size)  # hashing grows with the prompt, not with N
    need = Need(prompt_tokens=PROMPT_TOKENS, total_tokens=2 * PROMPT_TOKENS)
    left = iter(prompts)
    found["choice of a pair"] = _timed(
        lambda: crowd.dispatcher.choose(need, next(left), refused=set(), failed=Counter()), count
    )
    first = crowd.ticket()
    await first.wait()  # so that the next ones look at the workers' loads
    found["look before it is queued"] = _timed(crowd.enter, count)
    found["ready"] = _timed(lambda: crowd.workers.ready(Role.DECODE), count)
    loads = [some_load(crowd.rng, Role.DECODE) for _ in range(count)]
    samples = []
    for client, load in zip(crowd.clients, loads, strict=False):
        start = time.thread_time()
        await client.hear(load)
        await asyncio.sleep(0)  # what it has scheduled
        samples.append((time.thread_time() - start) * 1000)
    found["report while requests wait"] = sorted(samples)
    refs = crowd.refs[:-1]
    found["a view in which one has left"] = _timed(lambda: crowd.workers.set(refs), 20)
    for client in crowd.clients:
        await client.close()
    return {
        name: (times[len(times) // 2], times[int(0.99 * (len(times) - 1))])
        for name, times in found.items()
    }


def prefix_bytes() -> int:
    """Bytes of a router's index of one worker with a pool of a million tokens, while it changes."""
    held = HintSet()
    held.change(added=random.Random(1).randbytes(8 * POOL_BLOCKS))
    held.change(added=random.Random(2).randbytes(8 * 900))
    return held.num_bytes
