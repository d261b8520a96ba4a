"""The parts that both workers share."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from concurrency.event_loop import Tasks
from grammar.matcher import Matcher
from observability.clock import Rate
from protocol.errors import (
    Cancelled,
    Internal,
    InvalidRequest,
    Overloaded,
    StaleMessage,
    Unavailable,
)
from protocol.ids import Role, WorkerRef
from protocol.kv_layout import CacheChange, hints, split_hints
from protocol.messages import (
    Cancel,
    DrainCommand,
    EventBatch,
    StatusQuery,
    Submit,
    Subscribe,
    TokenEvent,
    WorkerLoad,
)
from protocol.sampling import Grammar, GrammarKind
from protocol.states import WorkerState
from rpc import methods
from rpc.client import ControlClient
from rpc.server import ControlServer
from tests.support.blocks import FINGERPRINT
from tests.support.submits import KEY, LIMITS, make_submit
from worker_runtime.config import WorkerConfig
from worker_runtime.control.control_service import ControlService
from worker_runtime.control.event_publisher import EventPublisher
from worker_runtime.control.grammars import Grammars
from worker_runtime.scheduling.messages import (
    RouterEvents,
    Snapshot,
)
from worker_runtime.scheduling.sequence import Sequence
from worker_runtime.step_loop import Inbox


def reported(load: WorkerLoad = WorkerLoad()) -> tuple[WorkerState, Role, WorkerLoad]:  # noqa: B008
    """What a worker says of itself in every batch."""
    return WorkerState.READY, Role.DECODE, load


class TestInbox:
    def test_keeps_order_and_drains_all(self) -> None:
        inbox: Inbox[int] = Inbox()
        for i in range(5):
            inbox.put(i)
        assert inbox.drain() == [0, 1, 2, 3, 4]
        assert inbox.drain() == []

    def test_wait_ends_when_a_command_arrives(self) -> None:
        inbox: Inbox[int] = Inbox()
        thread = threading.Thread(target=inbox.put, args=(1,))
        thread.start()
        inbox.wait(1e12)
        thread.join()
        assert inbox.drain() == [1]

    def test_close_wakes_for_good(self) -> None:
        inbox: Inbox[int] = Inbox()
        inbox.close()
        inbox.wait(math.inf)
        assert inbox.closed


def test_rate_is_over_busy_time_only() -> None:
    rate = Rate()
    assert rate.per_second() == 0.0
    for _ in range(50):
        rate.add(100, 0.5)
    assert rate.per_second() == pytest.approx(200.0)
    for _ in range(200):
        rate.add(100, 0.25)
    assert rate.per_second() == pytest.approx(400.0, rel=0.01)


def test_sequence_bans_stop_tokens_before_min_tokens() -> None:
    submit = make_submit(min_tokens=2, stop_token_ids=(7,), eos_token_ids=(2,))
    sequence = Sequence.from_submit(submit, 0.0)
    assert sequence.launch(2, samples=False, row=0).banned == ()
    sequence.land(2)
    for token in (7, 1):
        assert sequence.launch(1, samples=True, row=0).banned == (7, 2)
        sequence.land(1)
        assert sequence.append(token) is None
    assert sequence.launch(1, samples=True, row=0).banned == ()
    sequence.land(1)
    assert sequence.append(7) == "stop"


def test_sequence_goes_on_from_the_token_in_flight() -> None:
    sequence = Sequence.from_submit(make_submit((1, 2, 3), min_tokens=1, max_tokens=2), 0.0)
    assert sequence.launch(3, samples=True, row=4).previous is None
    assert sequence.num_runnable == 1
    step = sequence.launch(1, samples=True, row=0)
    assert (step.tokens, step.start, step.previous) == ((0,), 3, 4)
    assert sequence.num_runnable == 0
    sequence.land(3)
    sequence.append(9)
    assert (sequence.num_computed, sequence.num_launched, sequence.num_pending) == (3, 4, 1)


def test_sequence_scores_a_bounded_part_of_its_prompt_in_one_step() -> None:
    sequence = Sequence.from_submit(make_submit((1,) * 700, prompt_logprobs=0), 0.0)
    assert sequence.chunk(700, 4096) == (512, False)
    sequence.launch(512, samples=False, row=0)
    assert sequence.chunk(188, 4096) == (188, True)


def test_sequence_with_penalties_waits_for_the_token_in_flight() -> None:
    sequence = Sequence.from_submit(make_submit((1, 2, 3), presence_penalty=1.0), 0.0)
    sequence.launch(3, samples=True, row=0)
    assert sequence.num_runnable == 0
    sequence.land(3)
    sequence.append(9)
    assert sequence.launch(1, samples=True, row=0).tokens == (9,)


class TestEventPublisher:
    @pytest.fixture
    def gone(self) -> list[str]:
        return []

    @pytest.fixture
    def publisher(self, gone: list[str]) -> EventPublisher:
        return EventPublisher(
            epoch=5,
            heartbeat_s=0.05,
            report=lambda: reported(WorkerLoad(running=3)),
            on_gone=gone.append,
        )

    async def test_first_batch_comes_at_once_and_silence_is_broken(
        self, publisher: EventPublisher
    ) -> None:
        stream = publisher.stream("r")
        first = await anext(stream)
        second = await anext(stream)
        assert (first.epoch, first.load.running) == (5, 3)
        assert (second.epoch, second.tokens) == (5, ())
        await stream.aclose()  # type: ignore[attr-defined]

    async def test_events_reach_their_router_only(self, publisher: EventPublisher) -> None:
        mine, other = publisher.stream("mine"), publisher.stream("other")
        await anext(mine)
        await anext(other)
        event = TokenEvent(key=KEY, index=0, token=4)
        publisher.publish({"mine": RouterEvents(tokens=[event]), "unknown": RouterEvents()})
        assert (await anext(mine)).tokens == (event,)
        assert (await anext(other)).tokens == ()

    async def test_a_router_that_takes_nothing_counts_as_gone(self, gone: list[str]) -> None:
        publisher = EventPublisher(
            epoch=5,
            heartbeat_s=0.05,
            patience_s=0.1,
            report=reported,
            on_gone=gone.append,
        )
        frozen, quick = publisher.stream("frozen"), publisher.stream("quick")
        await anext(frozen)
        await anext(quick)
        for index in range(40):
            event = TokenEvent(key=KEY, index=index, token=4)
            publisher.publish({name: RouterEvents(tokens=[event]) for name in ("frozen", "quick")})
            while (await anext(quick)).tokens != (event,):
                pass
            if gone:
                break
            await asyncio.sleep(0.01)
        assert gone == ["frozen"]
        assert publisher.knows("quick")
        assert not publisher.knows("frozen")
        assert [batch.tokens async for batch in frozen] == []  # what waited was dropped
        assert gone == ["frozen"]

    async def test_a_router_that_freezes_on_its_connection_counts_as_gone(
        self, gone: list[str]
    ) -> None:
        """Though its system still takes in what is sent to it."""
        publisher = EventPublisher(
            epoch=5, heartbeat_s=9.0, patience_s=0.2, report=reported, on_gone=gone.append
        )
        handlers = {methods.EVENTS: lambda subscribe: publisher.stream(subscribe.router_id)}
        server = ControlServer(handlers, secret=b"s")
        client = ControlClient(await server.start(), secret=b"s")
        stream = client.stream(methods.EVENTS, Subscribe(router_id="frozen"))
        await anext(stream)
        async with asyncio.timeout(60):
            while not gone:
                publisher.publish({"frozen": RouterEvents()})
                await asyncio.sleep(0.001)
        assert gone == ["frozen"]
        await client.close()
        await server.stop()

    async def test_an_idle_router_is_not_gone(
        self, gone: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 0.0
        monkeypatch.setattr(
            "worker_runtime.control.event_publisher.time", SimpleNamespace(monotonic=lambda: now)
        )
        publisher = EventPublisher(epoch=5, heartbeat_s=60.0, report=reported, on_gone=gone.append)
        stream = publisher.stream("r")
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        now += 100.0
        publisher.publish({"r": RouterEvents()})
        publisher.publish({"r": RouterEvents()})
        await waiting
        assert gone == []
        await stream.aclose()  # type: ignore[attr-defined]

    @pytest.mark.parametrize("ticks", range(4))
    async def test_a_cancel_that_meets_an_event_ends_the_stream(
        self, publisher: EventPublisher, gone: list[str], ticks: int
    ) -> None:
        stream = publisher.stream("r")
        await anext(stream)

        async def read() -> None:
            async for _ in stream:
                pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        publisher.publish({"r": RouterEvents()})
        for _ in range(ticks):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait({reader}, timeout=60)
        assert reader.cancelled()
        assert gone == ["r"]

    async def test_end_of_a_stream_is_told_once(
        self, publisher: EventPublisher, gone: list[str]
    ) -> None:
        stream = publisher.stream("r")
        await anext(stream)
        assert publisher.knows("r")
        await stream.aclose()  # type: ignore[attr-defined]
        assert gone == ["r"]
        assert not publisher.knows("r")

    async def test_second_stream_replaces_the_first_whose_requests_the_router_has_lost(
        self, publisher: EventPublisher, gone: list[str]
    ) -> None:
        first = publisher.stream("r")
        await anext(first)
        second = publisher.stream("r")
        await anext(second)
        assert gone == ["r"]  # before anything new of it can come
        assert [batch async for batch in first] == []
        assert gone == ["r"]
        assert publisher.knows("r")

    async def test_each_router_is_told_all_of_the_cache_and_then_its_changes(
        self, publisher: EventPublisher
    ) -> None:
        a, b, c = (bytes([i]) * 32 for i in range(3))
        publisher.cache.change({a: True, b: True})
        early = publisher.stream("early")
        told = (await anext(early)).cache
        assert told is not None
        assert told.reset
        assert set(split_hints(told.added)) == set(split_hints(hints([a, b])))
        publisher.cache.change({b: False, c: True})
        publisher.cache.change({c: False})
        late = publisher.stream("late")
        assert (await anext(late)).cache == CacheChange(reset=True, added=hints([a]))
        change = (await anext(early)).cache
        assert change is not None
        assert (change.reset, change.added) == (False, b"")
        assert change.removed == hints([b])  # of c it never knew
        assert (await anext(early)).cache is None

    async def test_a_replaced_stream_takes_nothing_from_its_successor(
        self, publisher: EventPublisher
    ) -> None:
        first = publisher.stream("r")
        await anext(first)
        publisher.publish({"r": RouterEvents(tokens=[TokenEvent(key=KEY, index=0, token=4)])})
        second = publisher.stream("r")
        opened = asyncio.create_task(anext(second))
        await asyncio.sleep(0)
        publisher.cache.change({b"a" * 32: True})
        assert [batch.cache for batch in [batch async for batch in first]] == [None]
        assert (await opened).cache == CacheChange(reset=True)
        assert (await anext(second)).cache == CacheChange(added=b"a" * 8)

    async def test_close_ends_streams_after_what_is_queued_and_no_router_is_gone(
        self, publisher: EventPublisher, gone: list[str]
    ) -> None:
        """Else a worker that stops would release what it has, and decode drop it unsaid."""
        stream = publisher.stream("r")
        await anext(stream)
        event = TokenEvent(key=KEY, index=0, token=4)
        publisher.publish({"r": RouterEvents(tokens=[event])})
        publisher.close()
        assert [batch.tokens async for batch in stream] == [(event,)]
        assert gone == []


class FakeProgress:
    steps = 4
    last_step_end = 0.0
    broken: Exception | None = None
    stalled = 0.0

    def stalled_for(self) -> float:
        return self.stalled

    def standstill(self) -> str:
        return "between two steps"


class SlowGrammars(Grammars):
    """Compiles once `done` is set."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked = asyncio.Semaphore(0)
        self.done = asyncio.Event()

    async def matcher(self, submit: Submit) -> Matcher:
        self.asked.release()
        await self.done.wait()
        return None  # type: ignore[return-value]


class TestControlService:
    @pytest.fixture
    def progress(self) -> FakeProgress:
        return FakeProgress()

    @pytest.fixture
    def accepted(self) -> list[Submit]:
        return []

    @pytest.fixture
    def cancelled(self) -> list[Cancel]:
        return []

    @pytest.fixture
    async def control(
        self, progress: FakeProgress, accepted: list[Submit], cancelled: list[Cancel]
    ) -> ControlService:
        return ControlService(
            ref=WorkerRef(worker_id="d0", epoch=9, role=Role.DECODE, address="x"),
            limits=LIMITS,
            fingerprint=FINGERPRINT,
            precision="int8",
            config=WorkerConfig(max_waiting=2, heartbeat_s=0.05, stall_s=1.0),
            progress=progress,
            clock=time.time,
            accept=lambda command: accepted.append(command.submit) or len(accepted),
            move=lambda _move: 1,
            role_changed=lambda _role: None,
            grammars=SlowGrammars(),
            cancel=lambda cancel: cancelled.append(cancel) or 1,
            router_gone=lambda _router: None,
        )

    @pytest.fixture
    async def client(self, control: ControlService) -> AsyncIterator[ControlClient]:
        server = ControlServer(control.handlers(), secret=b"s")
        client = ControlClient(await server.start(), secret=b"s")
        yield client
        await client.close()
        await server.stop(0)

    async def subscribe(self, client: ControlClient) -> AsyncIterator[EventBatch]:
        stream = client.stream(methods.EVENTS, Subscribe(router_id="r"))
        await anext(stream)
        return stream

    async def test_refuses_before_ready_and_while_draining(
        self, control: ControlService, client: ControlClient
    ) -> None:
        with pytest.raises(Unavailable, match="starting"):
            await client.call(methods.SUBMIT, make_submit(), timeout_s=60)
        control.become(WorkerState.READY)
        stream = await self.subscribe(client)
        await client.call(methods.SUBMIT, make_submit(), timeout_s=60)
        await client.call(methods.DRAIN, DrainCommand(), timeout_s=60)
        with pytest.raises(Unavailable, match="draining"):
            await client.call(methods.SUBMIT, make_submit(), timeout_s=60)
        await stream.aclose()  # type: ignore[attr-defined]

    async def test_refuses_a_router_that_does_not_listen(
        self, control: ControlService, client: ControlClient
    ) -> None:
        control.become(WorkerState.READY)
        with pytest.raises(StaleMessage) as caught:
            await client.call(methods.SUBMIT, make_submit(), timeout_s=60)
        assert caught.value.param == "router_id"

    async def test_refuses_once_the_engine_broke(
        self,
        control: ControlService,
        client: ControlClient,
        progress: FakeProgress,
        accepted: list[Submit],
    ) -> None:
        control.become(WorkerState.READY)
        stream = await self.subscribe(client)
        progress.broken = RuntimeError("boom")
        with pytest.raises(Unavailable, match="broke"):
            await client.call(methods.SUBMIT, make_submit(), timeout_s=60)
        assert accepted == []
        await stream.aclose()  # type: ignore[attr-defined]

    async def test_bounds_waiting_requests_even_between_snapshots(
        self, control: ControlService, client: ControlClient, accepted: list[Submit]
    ) -> None:
        control.become(WorkerState.READY)
        stream = await self.subscribe(client)
        for _ in range(2):
            await client.call(methods.SUBMIT, make_submit(), timeout_s=60)
        with pytest.raises(Overloaded) as caught:
            await client.call(methods.SUBMIT, make_submit(), timeout_s=60)
        assert caught.value.retry_after_s == 1.0
        control.publish({}, Snapshot(num_unfinished=2), 2)
        await client.call(methods.SUBMIT, make_submit(), timeout_s=60)
        assert len(accepted) == 3
        await stream.aclose()  # type: ignore[attr-defined]

    async def test_bad_request_is_refused_by_name_and_not_accepted(
        self, control: ControlService, client: ControlClient, accepted: list[Submit]
    ) -> None:
        control.become(WorkerState.READY)
        stream = await self.subscribe(client)
        with pytest.raises(InvalidRequest) as caught:
            await client.call(methods.SUBMIT, make_submit((500,)), timeout_s=60)
        assert caught.value.param == "prompt"
        assert accepted == []
        await stream.aclose()  # type: ignore[attr-defined]

    async def test_a_request_whose_grammar_is_compiled_can_still_be_cancelled(
        self, control: ControlService, client: ControlClient, accepted: list[Submit]
    ) -> None:
        control.become(WorkerState.READY)
        stream = await self.subscribe(client)
        grammar = Grammar(kind=GrammarKind.REGEX, source="a")
        submit = replace(make_submit(), grammar=grammar)
        grammars = control._grammars
        assert isinstance(grammars, SlowGrammars)
        accept, came = control._accept, list[float]()
        control._accept = lambda command: came.append(command.at) or accept(command)
        for cancel, drain in ((False, False), (True, False), (False, True)):
            grammars.done.clear()
            waiting = asyncio.create_task(client.call(methods.SUBMIT, submit, timeout_s=60))
            await asyncio.wait_for(grammars.asked.acquire(), 60)
            asked = time.time()
            assert len(accepted) == (cancel or drain)  # only the first is ever accepted
            if cancel:
                await client.call(methods.CANCEL, Cancel(keys=(KEY,)), timeout_s=60)
            if drain:
                await client.call(methods.DRAIN, DrainCommand(), timeout_s=60)
            grammars.done.set()
            if not cancel and not drain:
                await waiting
                assert came[0] <= asked  # it is as old as the wait for its grammar
                continue
            with pytest.raises(Cancelled if cancel else Unavailable):
                await waiting
        assert accepted == [submit]
        assert not control._preparing
        await stream.aclose()  # type: ignore[attr-defined]

    async def test_cancel_passes_the_keys(
        self, client: ControlClient, cancelled: list[Cancel]
    ) -> None:
        await client.call(methods.CANCEL, Cancel(keys=(KEY,)), timeout_s=60)
        assert cancelled == [Cancel(keys=(KEY,))]

    async def test_status_tells_state_limits_and_progress(
        self, control: ControlService, client: ControlClient
    ) -> None:
        control.publish({}, Snapshot(load=WorkerLoad(free_blocks=7), counters={"finished": 2}), 0)
        status = await client.call(methods.STATUS, StatusQuery(), timeout_s=60)
        assert status.state is WorkerState.STARTING
        assert status.load.free_blocks == 7
        assert (status.max_model_len, status.max_prompt_tokens) == (50, 39)
        assert (status.steps, status.counters) == (4, {"finished": 2})

    async def test_drain_waits_for_the_last_request(
        self, control: ControlService, client: ControlClient
    ) -> None:
        control.become(WorkerState.READY)
        stream = await self.subscribe(client)
        await client.call(methods.SUBMIT, make_submit(), timeout_s=60)
        assert not await control.drained(0.05)
        control.publish({}, Snapshot(num_unfinished=1), 1)
        waiting = asyncio.create_task(control.drained(5.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        control.publish({}, Snapshot(num_unfinished=0), 0)
        assert await waiting
        await stream.aclose()  # type: ignore[attr-defined]

    async def test_health_follows_step_progress_and_idle_is_healthy(
        self, control: ControlService, progress: FakeProgress
    ) -> None:
        control.check_health()
        progress.stalled = 2.0
        with pytest.raises(Internal, match=r"no progress for 2\.0 s: between two steps"):
            control.check_health()
        progress.stalled = 0.0
        progress.broken = RuntimeError("boom")
        with pytest.raises(Internal, match="boom"):
            control.check_health()


async def test_tasks_keep_and_cancel_what_runs() -> None:
    tasks = Tasks()
    done: list[str] = []

    async def quick() -> None:
        done.append("quick")

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            done.append("cancelled")
            raise

    tasks.start(quick())
    tasks.start(slow())
    await asyncio.sleep(0.01)
    await tasks.shutdown()
    assert done == ["quick", "cancelled"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_waiting", 0),
        ("max_num_batched_tokens", 1),
        ("watermark", 1.0),
        ("stall_s", 0.0),
    ],
)
def test_worker_config_names_the_bad_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        WorkerConfig(**{field: value})  # type: ignore[arg-type]
