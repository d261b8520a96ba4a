"""Prefill and decode workers in this process, and a client that plays the router."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from msgspec.structs import replace

from decode_worker.scheduler import DecodeScheduler
from engine.config import EngineConfig
from engine.ranks.group import RankGroup
from kv_tiers.config import TierConfig
from kv_transfer.config import TransferConfig
from prefill_worker.scheduler import PrefillScheduler
from protocol.errors import BatonError, Internal
from protocol.ids import RequestKey, Role, WorkerRef, new_request_id
from protocol.kv_layout import KVLayout
from protocol.messages import (
    Cancel,
    EventBatch,
    FailEvent,
    PrefixSource,
    ScoreEvent,
    Submit,
    Subscribe,
    Ticket,
    TokenEvent,
)
from protocol.sampling import Grammar, SamplingParams, TokenLogprobs
from protocol.states import FinishReason
from protocol.timeline import Phase, Span
from rpc import methods
from rpc.client import ClientPool
from tests.support.invariants import check_scheduler
from tests.support.processes import forks
from worker_runtime.config import WorkerConfig
from worker_runtime.ranks import follow_rank
from worker_runtime.scheduling.messages import RoleChanged
from worker_runtime.worker import Worker, WorkerSettings

SECRET = b"test secret"
SCHEDULERS = {Role.PREFILL: PrefillScheduler, Role.DECODE: DecodeScheduler}
#: Steps so small that a prompt takes several.
SMALL_STEPS = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=32)


@dataclass
class Answer:
    """Everything the workers said about one request."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs | None] = field(default_factory=dict)
    scores: dict[int, TokenLogprobs] = field(default_factory=dict)
    finish: FinishReason | None = None
    failures: list[FailEvent] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    cached: int | None = None  # prompt tokens that were not computed
    arrivals: list[float] = field(default_factory=list)
    first: int | None = None  # index of its first token, which is another worker's than the rest
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """It is done with its last token, once what prefill says of it has come, too."""
        whole = self.first is None or (self.first in self.tokens and self.cached is not None)
        if self.finish is not None and whole:
            self.done.set()

    def ids(self) -> list[int]:
        assert sorted(self.tokens) == list(range(min(self.tokens), max(self.tokens) + 1))
        return [self.tokens[i] for i in sorted(self.tokens)]


class FakeRouter:
    """Submits to chosen workers and merges their events by token index."""

    def __init__(self, router_id: str = "test-router") -> None:
        self.router_id = router_id
        self.pool = ClientPool(secret=SECRET)
        self.answers: dict[RequestKey, Answer] = {}
        self._streams: list[asyncio.Task[None]] = []

    async def watch(self, ref: WorkerRef) -> None:
        started = asyncio.Event()
        self._streams.append(asyncio.create_task(self._follow(ref, started)))
        await asyncio.wait_for(started.wait(), 60)

    async def _follow(self, ref: WorkerRef, started: asyncio.Event) -> None:
        stream = self.pool.get(ref.address).stream(
            methods.EVENTS, Subscribe(router_id=self.router_id)
        )
        try:
            async for batch in stream:
                started.set()
                self._take(batch)
        except BatonError:
            return

    def _take(self, batch: EventBatch) -> None:
        for prompt in batch.prompts:
            if prompt.key in self.answers:
                self.answers[prompt.key].cached = prompt.num_cached_tokens
                self.answers[prompt.key].end()
        for scores in batch.scores:
            self._scores(scores)
        for event in batch.tokens:
            self._token(event)
        for failure in batch.failures:
            answer = self.answers.get(failure.key)
            if answer is not None:
                answer.failures.append(failure)
                answer.done.set()
        for part in batch.spans:
            if part.key in self.answers:
                self.answers[part.key].spans.extend(part.spans)

    def _scores(self, event: ScoreEvent) -> None:
        answer = self.answers.get(event.key)
        if answer is None:
            return
        assert answer.first not in answer.tokens, "the prompt's come before the first token"
        answer.scores |= enumerate(event.logprobs, start=event.start)
        if event.finish is not None:
            answer.finish = event.finish
            answer.spans.extend(event.spans)
            answer.done.set()

    def _token(self, event: TokenEvent) -> None:
        answer = self.answers.get(event.key)
        if answer is None:
            return
        assert event.index not in answer.tokens, "a token came twice"
        answer.tokens[event.index] = event.token
        answer.logprobs[event.index] = event.logprobs
        answer.arrivals.append(time.monotonic())
        if event.finish is not None:
            answer.finish = event.finish
            answer.spans.extend(event.spans)
        answer.end()

    async def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        decode: WorkerRef,
        prefill: WorkerRef | None,
        *,
        layout: KVLayout | None = None,
        timeout_s: float = 120.0,
        output: Sequence[int] = (),
        attempt: int = 0,
        grammar: Grammar | None = None,
        source: tuple[WorkerRef, int] | None = None,
    ) -> RequestKey:
        """`source`: another worker that should have so many tokens of the prompt."""
        key = RequestKey(new_request_id(), attempt)
        self.answers[key] = Answer(first=len(output))
        base = Submit(
            key=key,
            router_id=self.router_id,
            prompt_ids=tuple(prompt),
            output_ids=tuple(output),
            grammar=grammar,
            sampling=sampling,
            time_left_s=timeout_s,
        )
        computes = prefill or decode
        if source is not None:
            base = replace(base, source=_prefix_source(key, source, computes, timeout_s))
        if prefill is None:
            await self.pool.get(decode.address).call(methods.SUBMIT, base, timeout_s=60)
            return key
        ticket = Ticket(
            key=key,
            sender_epoch=prefill.epoch,
            receiver_epoch=decode.epoch,
            num_blocks=self._ticketed(len(prompt) + len(output), layout),
            lifetime_s=timeout_s,
        ).signed(SECRET)
        await asyncio.gather(
            self.pool.get(decode.address).call(
                methods.SUBMIT,
                replace(base, peer=prefill, ticket=ticket, source=None),
                timeout_s=60,
            ),
            self.pool.get(prefill.address).call(
                methods.SUBMIT, replace(base, peer=decode, ticket=ticket), timeout_s=60
            ),
        )
        return key

    @staticmethod
    def _ticketed(num_tokens: int, layout: KVLayout | None) -> int:
        """Blocks of a hand-off, by default of a model without windows."""
        return -(-num_tokens // 16) if layout is None else layout.pages_for(num_tokens)

    async def answer(self, key: RequestKey, timeout_s: float = 120.0) -> Answer:
        answer = self.answers[key]
        await asyncio.wait_for(answer.done.wait(), timeout_s)
        return answer

    async def cancel(self, key: RequestKey, *refs: WorkerRef) -> None:
        for ref in refs:
            await self.pool.get(ref.address).call(methods.CANCEL, Cancel(keys=(key,)), timeout_s=60)

    async def close(self) -> None:
        for task in self._streams:
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        await self.pool.close()


def _prefix_source(
    key: RequestKey, source: tuple[WorkerRef, int], computes: WorkerRef, lifetime_s: float
) -> PrefixSource:
    holder, num_tokens = source
    ticket = Ticket(
        key=key.loan,
        sender_epoch=holder.epoch,
        receiver_epoch=computes.epoch,
        num_blocks=num_tokens,
        lifetime_s=lifetime_s,
    ).signed(SECRET)
    return PrefixSource(worker=holder, ticket=ticket, num_tokens=num_tokens)


@dataclass
class Pair:
    """Running workers with the router that watches them."""

    router: FakeRouter
    prefills: list[Worker]
    decodes: list[Worker]
    prefill_refs: list[WorkerRef]
    decode_refs: list[WorkerRef]

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        local: bool = False,
        output: Sequence[int] = (),
        grammar: Grammar | None = None,
        source: tuple[WorkerRef, int] | None = None,
    ) -> Answer:
        prefill = None if local else self.prefill_refs[0]
        key = await self.router.submit(
            prompt,
            sampling,
            self.decode_refs[0],
            prefill,
            layout=self.decodes[0].status().layout,
            output=output,
            grammar=grammar,
            source=source,
        )
        return await self.router.answer(key)

    async def at_once(self, calls: Iterable[Awaitable[Answer]], *, running: int) -> list[Answer]:
        """Their answers. No sequence goes on to its third token on the first decode worker before
        so many decode there."""
        brake = Brake(self.decodes[0], 2)
        tasks = [asyncio.ensure_future(call) for call in calls]
        async with asyncio.timeout(60):
            while self.decodes[0].status().load.running < running:
                await asyncio.sleep(0.005)
        brake.release()
        return await asyncio.gather(*tasks)

    async def settled(self, answer: Answer) -> Answer:
        """The answer with prefill's part of the timeline, which may come after the last token."""
        await self.idle()
        async with asyncio.timeout(60):
            while not any(span.phase is Phase.TRANSFER for span in answer.spans):
                await asyncio.sleep(0.01)
        return answer

    async def idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no worker has anything left, then check that every block is free."""
        workers = [*self.prefills, *self.decodes]
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            loads = [worker.status().load for worker in workers]
            if all(
                load.running == load.waiting == load.held_blocks == load.quarantined_blocks == 0
                for load in loads
            ):
                break
            await asyncio.sleep(0.02)
        for load in loads:
            assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)
            assert (load.held_blocks, load.quarantined_blocks) == (0, 0)

    async def stored(self) -> None:
        """Wait until no KV copy or loan is in flight either, and the books of every tier agree."""
        await self.idle()
        end = time.monotonic() + 60.0
        for worker in (*self.prefills, *self.decodes):
            while (problem := unsettled(worker)) and time.monotonic() < end:
                await asyncio.sleep(0.01)
            assert not problem


def unsettled(worker: Worker) -> str:
    """What is in flight between the tiers of an idle worker, or does not add up there. The step
    thread may be at it still: ask again."""
    scheduler: Any = worker._loop._scheduler
    tiers, peers = scheduler._tiers, scheduler._peers
    try:
        assert tiers is None or (tiers.idle and not tiers.slots.num_leased), "copies"
        assert peers is None or not peers.num_active, "loans"
        check_scheduler(scheduler)
    except (AssertionError, Internal, RuntimeError) as error:  # a dictionary changed its size
        return f"{worker.ref.worker_id}: {error!r}"
    return ""


class Brake:
    """Keeps sequences that decode on a worker from their end until `release`, so that what a test
    does to them comes before it on any machine: none with `num_output` tokens has a step."""

    def __init__(self, worker: Worker, num_output: int) -> None:
        """`keys`: the sequences that it holds; all of them, while there are none."""
        self.keys: set[RequestKey] = set()
        self._worker = worker
        self._num_output: float = num_output
        scheduler: Any = worker._loop._scheduler._schedulers[Role.DECODE]  # type: ignore[attr-defined]
        self._runnable = scheduler._runnable
        scheduler._runnable = self._unheld

    def _unheld(self, now: float) -> list[tuple[Any, int]]:
        return [
            (entry, count)
            for entry, count in self._runnable(now)
            if entry.sequence.num_output < self._num_output
            or (self.keys and entry.sequence.key not in self.keys)
        ]

    def release(self, num_output: float = math.inf) -> None:
        """Let them go on to so many tokens."""
        self._num_output = num_output
        self._worker.inbox.put(RoleChanged(role=self._worker.control.role))  # look again


@asynccontextmanager
async def running_pair(
    model_path: str,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    dtype: str = "float32",
    prefill_blocks: int = 256,
    decode_blocks: int = 256,
    prefill_config: WorkerConfig | None = None,
    decode_config: WorkerConfig | None = None,
    transfer: TransferConfig | None = None,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    block_sizes: tuple[int, int] = (16, 16),
    tiers: TierConfig | None = None,
    engines: Mapping[Role, Mapping[str, Any]] | None = None,
) -> AsyncIterator[Pair]:
    """Workers over tcp, rank 0 of each in this process and the other ranks in processes of their
    own; everything is closed at the end. `block_sizes`: of prefill and of decode. `engines`: what
    else each role's EngineConfig has."""

    def settings(
        role: Role,
        number: int,
        blocks: int,
        config: WorkerConfig | None,
        tp: int,
        block_size: int,
    ) -> WorkerSettings:
        return WorkerSettings(
            worker_id=f"{role}-{number}",
            role=role,
            schedulers=SCHEDULERS,
            engine=EngineConfig(
                **{
                    "model_path": model_path,
                    "dtype": dtype,
                    "block_size": block_size,
                    "num_blocks": blocks,
                    "tp_size": tp,
                    "num_threads": 1,
                    **(engines or {}).get(role, {}),
                }
            ),
            worker=config or WorkerConfig(),
            transfer=transfer or TransferConfig(),
            tiers=tiers or TierConfig(host_bytes=64 << 20),
            secret=SECRET,
        )

    followers: list[BaseProcess] = []

    def group(worker: WorkerSettings) -> RankGroup | None:
        size = worker.engine.tp_size
        if size == 1:
            return None
        ranks = RankGroup(size, timeout_s=60.0, silence_s=60.0)  # however busy the machine is
        for rank in range(1, size):
            process = forks().Process(
                target=follow_rank,
                args=(ranks.invite, rank, worker.engine, worker.transfer, worker.tiers),
                daemon=True,
            )
            process.start()
            followers.append(process)
        return ranks

    prefills, decodes = [], []
    for i in range(num_prefill):
        own = settings(Role.PREFILL, i, prefill_blocks, prefill_config, prefill_tp, block_sizes[0])
        prefills.append(Worker(own, group=group(own)))
    for i in range(num_decode):
        own = settings(Role.DECODE, i, decode_blocks, decode_config, decode_tp, block_sizes[1])
        decodes.append(Worker(own, group=group(own)))
    prefill_refs = [await worker.start() for worker in prefills]
    decode_refs = [await worker.start() for worker in decodes]
    router = FakeRouter()
    for ref in (*prefill_refs, *decode_refs):
        await router.watch(ref)
    pair = Pair(router, prefills, decodes, prefill_refs, decode_refs)
    try:
        yield pair
    finally:
        await router.close()
        for worker in (*prefills, *decodes):
            await worker.stop()
        for process in followers:
            process.join(60)
            assert process.exitcode is not None, "a follower outlived its worker"
