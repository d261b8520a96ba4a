"""A router's outputs in flight over workers without engines, in virtual time.

The router's side is real: choice of workers, attempts, moves, recalls, clients of workers. Workers
keep the rules of `decode_worker` and `prefill_worker` about who owns a sequence and who tells what;
when they do what, and what fails, is random. Time goes on when nothing else is left to do, and a
loop that waits for nothing is a hang.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from observability.export import MetricSet
from observability.metrics import Metric
from protocol.errors import BatonError, DeadlineExceeded, Internal
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import split_hints
from protocol.messages import TokenEvent
from protocol.sampling import SamplingParams
from protocol.states import WorkerState
from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.sequence_jobs import SequenceJob
from router.dispatch.sequence_run import SequenceRun
from router.workers.bookkeeping import PromptBlocks
from router.workers.holders import marks
from router.workers.prompt_queues import MAX_GIVEN_BACK
from router.workers.worker_set import WorkerSet
from tests.support.faults import Faults
from tests.support.random_workers import HINTS, PROMPT, SECRET, RandomClient, RandomWorker


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer. Raises when there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        poll = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None = None) -> Any:
            assert timeout is not None, "everything waits for nothing"
            self.now += timeout and timeout + 1e-6
            return poll(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


@dataclass
class Output:
    """One output: what its client got."""

    tokens: tuple[int, ...]
    deadline: float
    patient: bool
    got: list[int] = field(default_factory=list)
    attempt: int = 0  # that the latest token came from
    cut_at: int | None = None
    ended: bool = False
    left: bool = False
    error: BatonError | None = None

    def take(self, event: TokenEvent) -> bool:
        assert not self.ended
        assert event.index == len(self.got), "out of order"
        assert event.key.attempt >= self.attempt, "left over from an attempt that has failed"
        self.attempt = event.key.attempt
        self.got.append(event.token)
        return len(self.got) == self.cut_at

    def score(self, event: Any) -> None:
        raise AssertionError(event)


class RouterWorld:
    """`fault_rate`: how often things fail. `unrest`: how often workers change."""

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        *,
        fault_rate: float,
        unrest: float = 1.0,
        **settings: Any,
    ) -> None:
        self.loop = loop
        self.random = random.Random(seed)
        self.fault_rate = fault_rate
        self.unrest = unrest
        self.tasks: set[asyncio.Task[Any]] = set()
        self.by_epoch: dict[int, RandomWorker] = {}
        self.by_address: dict[str, RandomWorker] = {}
        self.outputs: dict[str, Output] = {}
        self.given_back: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()  # by request: how often its prompt was begun with
        self.calm = False
        defaults: dict[str, Any] = {
            "local_prefill_tokens": self.random.choice([0, 0, 1000]),
            "local_gain_s": 0.03,
            "max_attempts": 1000,
            "submit_timeout_s": 2.0,
            "silence_s": 3.0,
        }
        config = RouterConfig(model_path="m", **(defaults | settings))
        self.set = WorkerSet(router_id="r", secret=SECRET, config=config)
        self.dispatcher = Dispatcher(
            router_id="r",
            workers=self.set,
            secret=SECRET,
            config=config,
            metric_set=MetricSet(model_name="m"),
            clock=loop.time,
            rng=self.random,
        )
        self.dispatcher.recalls._clock = loop.time

    # --- for workers ----------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.result()

    def choose(self, *values: Any) -> Any:
        return self.random.choice(values)

    async def pause(self, at_most: float) -> None:
        await asyncio.sleep(self.delay(at_most))

    def delay(self, at_most: float) -> float:
        return self.random.choice([0.0, self.random.random(), 1.0]) * at_most

    def fails(self, share: float) -> bool:
        return not self.calm and self.random.random() < self.fault_rate * share

    def tokens_of(self, key: RequestKey) -> tuple[int, ...]:
        return self.outputs[key.request_id].tokens

    def of(self, ref: WorkerRef | None) -> RandomWorker | None:
        worker = None if ref is None else self.by_epoch.get(ref.epoch)
        return worker if worker is not None and worker.alive else None

    # --- what happens ---------------------------------------------------------------------------

    def join(self, role: Role) -> RandomWorker:
        worker = RandomWorker(self, role, len(self.by_epoch))
        self.by_epoch[worker.ref.epoch] = self.by_address[worker.ref.address] = worker
        self.name()
        return worker

    def name(self) -> None:
        self.set.set([worker.ref for worker in self._ready()])

    def _living(self) -> list[RandomWorker]:
        return [worker for worker in self.by_epoch.values() if worker.alive]

    def _ready(self) -> list[RandomWorker]:
        """Those that the router is told of."""
        return [w for w in self._living() if w.named and w.state is WorkerState.READY]

    def count(self, which: Metric, **labels: str) -> float:
        return self.dispatcher.metrics.value(which, **labels)

    async def run(self, count: int) -> None:
        for role in (Role.PREFILL, Role.DECODE, Role.DECODE, Role.PREFILL):
            self.join(role)
        await asyncio.sleep(0.1)
        runs = []
        for number in range(count):
            runs.append(asyncio.create_task(self._ask(f"a{number}")))
            await self.pause(0.3)
            if self.random.random() < 0.3 * self.unrest:
                self._change()
        self.calm = True
        for role in Role:
            if all(worker.role is not role for worker in self._ready()):
                self.join(role)
        await asyncio.gather(*runs)
        await self.end()

    async def end(self) -> None:
        """Nothing is left of any output."""
        await asyncio.sleep(130.0)
        self._check()
        await self.set.close()
        assert len(self.set._holders) == 0
        for task in list(self.tasks):
            task.cancel()

    async def _ask(self, name: str) -> None:
        choose = self.random.choice
        size = choose([1, 1, 2, 2, 3, 8, 40, 200, 400, 400])
        tokens = tuple(self.random.randrange(100) for _ in range(size))
        patient = choose([True, True, False])
        deadline = self.loop.now + (120.0 if patient else 4.0)
        output = self.outputs[name] = Output(tokens, deadline, patient)
        output.cut_at = choose([None, None, 1, 2, 5])
        prompt = PROMPT[: choose([5, 5, 40, 1600])]
        run = self.run_of(name, prompt, wants_timeline=choose([True, False]))
        task = asyncio.create_task(run.run())
        if choose([True, False, False, False]):
            self.loop.call_later(choose([0.01, 0.2, 0.4, 1.0]), partial(self._go, output, task))
        try:
            await task
        except asyncio.CancelledError:
            assert output.left
        except BatonError as error:
            output.error = error
        output.ended = True
        self._check_end(output)

    def run_of(self, name: str, prompt: tuple[int, ...], *, wants_timeline: bool) -> SequenceRun:
        """The run of one of `outputs`."""
        output = self.outputs[name]
        job = SequenceJob(
            request_id=name,
            request_name=name,
            index=0,
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=len(output.tokens), seed=1),
            deadline=output.deadline,
            blocks=PromptBlocks(prompt),
            wants_timeline=wants_timeline,
        )
        return SequenceRun(self.dispatcher, job, output, on_submit=lambda: None)

    @staticmethod
    def _go(output: Output, task: asyncio.Task[None]) -> None:
        output.left = not task.done()
        task.cancel()

    def _change(self) -> None:
        """A worker joins, leaves, dies, stands still, breaks its stream or takes another role;
        without faults one that decodes stays."""
        worker = self.random.choice(self._living())
        decodes = [w for w in self._ready() if w.role is Role.DECODE]
        needed = not self.fault_rate and decodes == [worker]
        match self.random.randrange(11 if self.fault_rate else 7):
            case 0:
                self.join(self.random.choice(list(Role)))
            case 1 | 2 | 5 if not needed:
                self.start(self._change_role(worker, self.random.choice([1, 1, 3])))
            case 6 if not needed:
                worker.named = not worker.named
                self.name()
            case 3 if len(self._living()) > 3 and not needed:
                worker.state = WorkerState.DRAINING
                self.start(worker.leave())
                self.name()
            case 4:
                for each in self.set.all():
                    each.spread(2)
            case 7 if len(self._living()) > 3:
                worker.die()
                self.name()
            case 8 | 9:
                worker.lose_stream()
            case 10:
                worker.stand_still(self.random.choice([0.3, 1.0, 2.0, 5.0]))

    async def _change_role(self, worker: RandomWorker, times: int) -> None:
        for _ in range(times):
            if not self.calm:
                worker.role = self.random.choice(list(Role))
                worker.tell()
                await self.pause(0.1)

    # --- what must hold -------------------------------------------------------------------------

    def _check_end(self, output: Output) -> None:
        assert tuple(output.got) == output.tokens[: len(output.got)]
        assert self.loop.now < output.deadline + 0.1
        if output.left:
            return
        if output.error is None:
            assert len(output.got) in (len(output.tokens), output.cut_at)
            return
        assert not isinstance(output.error, Internal), output.error
        late = isinstance(output.error, DeadlineExceeded)
        assert late == (self.loop.now >= output.deadline), output.error
        assert not (late and output.patient), "it hung"
        assert late or not output.got, output.error

    def _check(self) -> None:
        """Nothing is left of any output."""
        for worker in self._living():
            assert not worker.held, worker.held
        assert not self.dispatcher.recalls._placed
        for mark in marks(split_hints(HINTS)):
            having = {client for client in self.set.all() if client.prefix.has(mark)}
            assert having == set(*self.set._holders.find([mark])), mark
        if not self.fault_rate:  # else the router may not hear of it
            assert max(self.given_back.values(), default=0) <= MAX_GIVEN_BACK
        assert {c.ref for c in self.set.all()} == {worker.ref for worker in self._ready()}
        for client in self.set.all():
            assert not client._sinks
            assert not client.calls._submits
            assert not client.calls._cancels
            assert not client.calls._cancel_after_submit
            reserved = client.reservations
            assert (reserved.sequences, reserved.tokens, reserved.blocks) == (0, 0, 0)
            assert not reserved._entries
            assert not client.prefix._by_request
            assert not client.prefix._expected
            assert client.breaker._probe is None


def run_world(seed: int, count: int, monkeypatch: Any, **rates: float) -> RouterWorld:
    """A world in which `count` outputs have ended."""
    world = RouterWorld(VirtualLoop(), seed, **rates)
    run_in(world, world.run(count), monkeypatch)
    return world


def run_in(world: RouterWorld, work: Coroutine[Any, Any, None], monkeypatch: Any) -> None:
    """Run a world's `work` to its end."""
    loop = world.loop
    client = type("Client", (RandomClient,), {"world": world})
    monkeypatch.setattr("router.workers.worker_client.ControlClient", client)
    clock = SimpleNamespace(monotonic=loop.time)
    monkeypatch.setattr("router.workers.worker_client.time", clock)
    asyncio.set_event_loop(loop)
    faults = Faults()
    loggers = [logging.getLogger(name) for name in ("baton.router", "asyncio")]
    for logger in loggers:
        logger.addHandler(faults)
    try:
        loop.run_until_complete(work)
        loop.run_until_complete(asyncio.sleep(1.0))
    finally:
        loop.close()
        gc.collect()  # a task tells of its error when it goes
        for logger in loggers:
            logger.removeHandler(faults)
    faults.check()
