"""One router and its workers on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulate.devices import StepTime
from cluster.bench.workload import Ask
from decode_worker.scheduler import DecodeScheduler
from engine.batch import StepBatch, StepResult
from engine.kv.allocator import BlockAllocator
from kv_transfer.control.listeners import TransferReport
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.messages import Submit, TokenEvent, WorkerLoad
from protocol.sampling import SamplingParams
from router.config import RouterConfig
from router.workers.bookkeeping import Reservations
from router.workers.policy import Need, WorkerView, choose
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import (
    AnnounceCommit,
    CommitAnnounced,
    CommitHandoff,
    Committed,
    Delivered,
    EndHandoff,
    Granted,
    HandoffEnded,
    StepOutput,
    Submitted,
)

_FINGERPRINT = KVFingerprint(
    model="simulated",
    weights="",
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    dtype="bfloat16",
    rope="",
)
#: A step is planned so long before the one in flight ends, and launched so fast when none is.
_LEAD_S = 0.7e-3
_LAUNCH_S = 0.3e-3
_LAND_S = 0.15e-3
#: One message between two processes; commit of a hand-off whose last layer has just left.
_MESSAGE_S = 0.6e-3
_COMMIT_S = 1.2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated. Blocks hold `block_size` tokens; each worker has `num_blocks`."""

    step_time: StepTime
    num_prefill: int = 1
    num_decode: int = 1
    prefill: WorkerConfig
    decode: WorkerConfig
    router: RouterConfig
    num_blocks: int = 30_000
    block_size: int = 32
    seed: int = 0


@dataclass(slots=True)
class Request:
    """One request and the times at which its tokens reached the client."""

    ask: Ask
    sent: float
    times: list[float] = field(default_factory=list)
    local: bool = False


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at that time, or now if it has passed."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call so many seconds from now."""
        self.at(self.now + seconds, call, *arguments)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)


class Worker:
    """A scheduler, and a device that runs its steps one after the other, planned one ahead."""

    def __init__(
        self,
        clock: Clock,
        scheduler: DecodeScheduler | PrefillScheduler,
        ref: WorkerRef,
        step_time: StepTime,
        publish: Callable[[Worker, Any], None],
    ) -> None:
        self.ref = ref
        self.load: WorkerLoad = scheduler.load()
        self.reservations = Reservations()
        self._clock = clock
        self._scheduler: Any = scheduler
        self._step_time = step_time
        self._publish = publish
        self._steps: deque[StepBatch] = deque()
        self._free_at = 0.0
        self._planning = False
        self._num_submits = 0

    def submit(self, submit: Submit) -> None:
        """A request arrives."""
        self._num_submits += 1
        self.tell(Submitted(submit=submit))
        self.reservations.submitted(submit.key, self._num_submits)

    def tell(self, command: object) -> None:
        """A command for the scheduler."""
        self._scheduler.handle(command, self._clock.now)
        self._plan_soon()

    def view(self, layout: KVLayout) -> WorkerView:
        """This worker as the router sees it."""
        return WorkerView(
            ref=self.ref,
            load=self.load,
            capacity=layout.num_blocks * layout.block_size,
            layout=layout,
            fingerprint=_FINGERPRINT,
            unseen_sequences=self.reservations.sequences,
            unseen_tokens=self.reservations.tokens,
            unseen_blocks=self.reservations.blocks,
        )

    def _plan_soon(self) -> None:
        if not self._planning and len(self._steps) < 2:
            self._planning = True
            self._clock.at(self._free_at - _LEAD_S if self._steps else 0.0, self._plan)

    def _plan(self) -> None:
        self._planning = False
        batch = self._scheduler.plan(self._clock.now)
        if batch is not None:
            self._scheduler.launched(0)
            launched = self._clock.now + (0.0 if self._steps else _LAUNCH_S)
            self._free_at = max(launched, self._free_at) + self._step_time(batch)
            self._steps.append(batch)
            self._clock.at(self._free_at + _LAND_S, self._land)
            self._plan_soon()
        self._report()

    def _land(self) -> None:
        batch = self._steps.popleft()
        tokens = tuple(None if step.sampling is None else 7 for step in batch.sequences)
        self._scheduler.apply(StepResult(tokens=tokens), self._clock.now)
        self._report()
        self._plan_soon()

    def _report(self) -> None:
        """Load travels with events: a worker that emits none tells the router nothing new."""
        out = self._scheduler.take_output()
        if out.events:
            self._clock.after(_MESSAGE_S, self._reported, self._scheduler.load(), self._num_submits)
        self._publish(self, out)

    def _reported(self, load: WorkerLoad, num_submits: int) -> None:
        self.load = load
        self.reservations.reported(num_submits)


class World:
    """Runs a list of requests and keeps the times of their tokens. `gaps_s`: the longest gap that
    each is promised."""

    def __init__(
        self, setup: Setup, asks: Sequence[Ask], gaps_s: Sequence[float | None] = ()
    ) -> None:
        self._setup = setup
        self._clock = Clock()
        self._rng = random.Random(setup.seed)
        self._requests: dict[RequestKey, Request] = {}
        self._pairs: dict[RequestKey, tuple[Worker, Worker | None]] = {}
        self._prefills = [self._worker(Role.PREFILL, i) for i in range(setup.num_prefill)]
        self._decodes = [self._worker(Role.DECODE, i) for i in range(setup.num_decode)]
        for number, (ask, gap_s) in enumerate(itertools.zip_longest(asks, gaps_s)):
            self._clock.at(ask.at, self._arrive, RequestKey(f"r{number}", 0), ask, gap_s)

    def run(self) -> list[Request]:
        """All requests, in the order of their arrival, when the last token has come."""
        self._clock.run()
        return list(self._requests.values())

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers."""
        return (*self._decodes, *self._prefills)

    def _worker(self, role: Role, number: int) -> Worker:
        prefills = role is Role.PREFILL
        scheduler = PrefillScheduler if prefills else DecodeScheduler
        ref = WorkerRef(worker_id=f"{role}-{number}", epoch=number + 1, role=role, address="-:1")
        made = scheduler(
            config=self._setup.prefill if prefills else self._setup.decode,
            blocks=BlockAllocator(self._setup.num_blocks, self._setup.block_size),
            fingerprint=_FINGERPRINT,
            place=str(role),
        )
        return Worker(self._clock, made, ref, self._setup.step_time, self._take)

    def _arrive(self, key: RequestKey, ask: Ask, gap_s: float | None) -> None:
        setup = self._setup
        layout = KVLayout(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=setup.block_size,
            num_blocks=setup.num_blocks,
            dtype="float32",
            rank_heads=((0, 1),),
        )
        views = {worker.ref: worker.view(layout) for worker in self.workers}
        choice = choose(
            Need(
                prompt_tokens=ask.prompt_tokens, total_tokens=ask.prompt_tokens + ask.output_tokens
            ),
            [views[worker.ref] for worker in self._decodes],
            [views[worker.ref] for worker in self._prefills],
            config=setup.router,
            rng=self._rng,
        )
        assert choice is not None
        workers = {worker.ref: worker for worker in self.workers}
        decode = workers[choice.decode.ref]
        prefill = None if choice.prefill is None else workers[choice.prefill.ref]
        self._requests[key] = Request(ask, self._clock.now, local=prefill is None)
        self._pairs[key] = decode, prefill
        submit = Submit(
            key=key,
            router_id="router",
            prompt_ids=(len(self._requests),) * ask.prompt_tokens,
            sampling=SamplingParams(seed=1, max_tokens=ask.output_tokens, ignore_eos=True),
            time_left_s=1e6,
            peer=None if prefill is None else prefill.ref,
            gap_s=gap_s,
        )
        blocks = -(-(ask.prompt_tokens + 1) // setup.block_size)
        self._submit(decode, submit, tokens=0 if prefill else ask.prompt_tokens, blocks=blocks)
        if prefill is not None:
            self._submit(prefill, submit, tokens=ask.prompt_tokens, blocks=0)

    def _submit(self, worker: Worker, submit: Submit, *, tokens: int, blocks: int) -> None:
        worker.reservations.reserve(submit.key, tokens=tokens, blocks=blocks)
        self._clock.after(_MESSAGE_S, worker.submit, submit)

    def _take(self, worker: Worker, out: StepOutput) -> None:
        """What one iteration of a worker's step loop hands out."""
        for events in out.events.values():
            for token in events.tokens:
                self._clock.after(_MESSAGE_S, self._token, token)
        for reserve in out.reserves:
            _, prefill = self._pairs[reserve.key]
            assert prefill is not None
            granted = Granted(key=reserve.key, num_cached_tokens=0, num_tokens=reserve.num_tokens)
            self._clock.after(_MESSAGE_S, prefill.tell, granted)
        for handoff in out.sends:
            if isinstance(handoff, CommitHandoff):
                self._commit(worker, handoff)
            elif isinstance(handoff, AnnounceCommit):
                at = self._clock.now + handoff.in_s
                announced = CommitAnnounced(key=handoff.key, at=at)
                self._clock.after(_MESSAGE_S, self._pairs[handoff.key][0].tell, announced)
            elif isinstance(handoff, EndHandoff):
                ended = HandoffEnded(key=handoff.key, error=None)
                for informed in (self._pairs[handoff.key][0], worker):
                    self._clock.after(_MESSAGE_S, informed.tell, ended)

    def _commit(self, prefill: Worker, handoff: CommitHandoff) -> None:
        decode, _ = self._pairs[handoff.key]
        committed = Committed(key=handoff.key, tokens=handoff.tokens)
        self._clock.after(_COMMIT_S, decode.tell, committed)
        now = self._clock.now
        report = TransferReport(start=now, end=now + _COMMIT_S, num_bytes=0, num_pieces=0)
        self._clock.after(_COMMIT_S, prefill.tell, Delivered(key=handoff.key, report=report))

    def _token(self, event: TokenEvent) -> None:
        request = self._requests[event.key]
        request.times.append(self._clock.now)
        for worker in self._pairs[event.key]:
            if worker is None:
                continue
            if len(request.times) == 1:
                worker.reservations.computed(event.key)
            if event.finish is not None:
                worker.reservations.release(event.key)
