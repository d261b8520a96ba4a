"""Workers without an engine: real control servers that emit scripted tokens at a set rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from protocol.errors import BatonError, Cancelled, Unavailable
from protocol.ids import RequestKey, Role, WorkerRef, new_epoch
from protocol.kv_layout import CacheChange, KVLayout
from protocol.loads import QueuedPrompt
from protocol.messages import (
    Ack,
    Cancel,
    EventBatch,
    FailEvent,
    HandoffEnd,
    MoveRequest,
    PromptEvent,
    RoleCommand,
    ScoreEvent,
    SpanEvent,
    StatusQuery,
    Submit,
    Subscribe,
    TokenEvent,
    WorkerLoad,
    WorkerStatus,
)
from protocol.sampling import TokenLogprobs
from protocol.states import FinishReason, WorkerState
from protocol.timeline import Phase, Span
from rpc.methods import CANCEL, END, EVENTS, MOVE, ROLE, STATUS, SUBMIT
from rpc.server import ControlServer
from tests.support.blocks import FINGERPRINT

#: All output tokens of a request, from index 0, as long as it likes.
Script = Callable[[Submit], Sequence[int]]


def stub_logprobs(token: int, count: int) -> TokenLogprobs:
    """The token is second likeliest, after the next id; then come the ids before it."""
    ids = [token + 1, *range(token, max(token - count, -1), -1)][:count]
    return TokenLogprobs(
        logprob=-0.75,
        rank=2,
        top_ids=tuple(ids),
        top_logprobs=tuple(-0.5 - 0.25 * i for i in range(len(ids))),
    )


def counting(submit: Submit) -> list[int]:
    """20, 21, 22, ... : a script that says how far it has come."""
    return [20 + i % 200 for i in range(submit.sampling.max_tokens)]


@dataclass(slots=True)
class StubWorker:
    """One worker. Its fields script its answers and record its requests."""

    role: Role
    fleet: StubFleet
    name: str
    script: Script = counting
    delay_s: float = 0.0  # between tokens
    prefill_delay_s: float = 0.0
    decode_step_s: float = 0.0  # reported
    num_blocks: int = 64
    free_blocks: int | None = None  # reported
    max_model_len: int = 8192
    weights: str = ""
    refuse: BatonError | None = None
    fail_after: int | None = None  # fail every request before this output token
    fail_error: BatonError = field(default_factory=lambda: Unavailable("stub failed"))
    fail_retriable: bool = True
    fail_attempts: int = 1000  # of each request
    answers_late: bool = False  # to submits: never, but they run
    silent: bool = False
    scores_before_death: bool = False  # once in the fleet: break with half a prompt scored
    cached_tokens: int | None = None  # said of every prompt
    gate: asyncio.Event | None = None  # if set, tokens after the first wait for this
    accepting: asyncio.Event | None = None  # if set, Submit is answered only once this is
    state: WorkerState = WorkerState.READY
    epoch: int = field(default_factory=new_epoch)
    prompts: tuple[QueuedPrompt, ...] = ()  # reported to wait
    prompt_rate: float = 0.0
    gives_back: bool = True  # what it has not begun, when it is asked to; otherwise it goes on
    hands_over: bool = True  # what is to move; otherwise it acknowledges and goes on
    tells_of_leaving: bool = True
    num_submits: int = 0  # received, answered or not
    moves: list[MoveRequest] = field(default_factory=list)
    next_index: dict[RequestKey, int] = field(default_factory=dict)
    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[RequestKey] = field(default_factory=list)
    asked_back: list[RequestKey] = field(default_factory=list)
    ends: list[HandoffEnd] = field(default_factory=list)
    running: dict[RequestKey, asyncio.Task[None]] = field(default_factory=dict)
    ref: WorkerRef | None = None
    _server: ControlServer | None = None
    _streams: dict[str, asyncio.Queue[EventBatch | None]] = field(default_factory=dict)

    async def start(self) -> WorkerRef:
        """Serve on a free port."""
        handlers = {
            SUBMIT: self._submit,
            CANCEL: self._cancel,
            MOVE: self._move,
            END: self._end,
            STATUS: self._status,
            ROLE: self._role,
            EVENTS: self._events,
        }
        self._server = ControlServer(handlers, secret=self.fleet.secret)
        address = await self._server.start()
        self.ref = WorkerRef(worker_id=self.name, epoch=self.epoch, role=self.role, address=address)
        return self.ref

    async def stop(self) -> None:
        """Die: every stream breaks."""
        for task in self.running.values():
            task.cancel()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def tell_cache(self, change: CacheChange) -> None:
        """Say something about the prefix cache."""
        for queue in self._streams.values():
            queue.put_nowait(self._batch(cache=change))

    def break_streams(self) -> None:
        """End the event streams but stay alive."""
        for queue in self._streams.values():
            queue.put_nowait(None)

    def change(self, role: Role) -> None:
        """Take another role, and say so."""
        self.role = role
        for queue in self._streams.values():
            queue.put_nowait(self._batch())

    # --- control methods --------------------------------------------------------------------------

    async def _submit(self, submit: Submit) -> Ack:
        self.num_submits += 1
        if self.accepting is not None:
            await self.accepting.wait()
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(submit)
        self.running[submit.key] = asyncio.create_task(self._run(submit))
        if self.answers_late:
            await asyncio.Event().wait()
        return Ack()

    async def _cancel(self, cancel: Cancel) -> Ack:
        if cancel.unless_begun:
            self.asked_back += cancel.keys
            if self.gives_back:
                self.give_back(cancel.keys)
            return Ack()
        for key in cancel.keys:
            self.cancelled.append(key)
            task = self.running.pop(key, None)
            if task is not None:
                task.cancel()
        return Ack()

    def give_back(self, keys: Sequence[RequestKey]) -> None:
        """Say that nothing was done for these attempts."""
        for submit in self.submitted:
            if submit.key in keys and submit.key in self.running:
                self.running.pop(submit.key).cancel()
                error = Cancelled("given back").info()
                event = FailEvent(key=submit.key, error=error, retriable=True, given_back=True)
                self._publish(submit, failures=(event,))

    def report(self, *prompts: QueuedPrompt) -> None:
        """Say that these prompts wait."""
        self.prompts = prompts
        for queue in self._streams.values():
            queue.put_nowait(self._batch())

    async def _move(self, request: MoveRequest) -> Ack:
        self.moves.append(request)
        task = self.running.get(request.key)
        if self.hands_over and task is not None:
            task.cancel()
            (submit,) = (each for each in self.submitted if each.key == request.key)
            if self.tells_of_leaving:
                span = Span(phase=Phase.DECODE, start=self.fleet.now(), end=self.fleet.now())
                self._publish(submit, spans=(SpanEvent(key=submit.key, spans=(span,)),))
            self.fleet.moved(request.to).set_result(self.next_index[request.key])
        return Ack()

    async def _end(self, end: HandoffEnd) -> Ack:
        self.ends.append(end)
        return Ack()

    async def _role(self, command: RoleCommand) -> Ack:
        self.change(command.role)
        return Ack()

    async def _status(self, query: StatusQuery) -> WorkerStatus:
        assert self.ref is not None
        return WorkerStatus(
            ref=self.ref,
            state=self.state,
            role=self.role,
            load=self._load(),
            layout=KVLayout(
                num_layers=1,
                num_kv_heads=1,
                head_dim=8,
                block_size=16,
                num_blocks=self.num_blocks,
                dtype="float32",
                rank_heads=((0, 1),),
            ),
            fingerprint=replace(FINGERPRINT, weights=self.weights or FINGERPRINT.weights),
            precision="int4" if self.role is Role.DECODE else "fp8",
            max_model_len=self.max_model_len,
            max_prompt_tokens=min(self.max_model_len, self.num_blocks * 16) - 1,
            steps=1,
            last_step_age_s=0.0,
        )

    async def _events(self, subscribe: Subscribe) -> AsyncIterator[EventBatch]:
        queue: asyncio.Queue[EventBatch | None] = asyncio.Queue()
        self._streams[subscribe.router_id] = queue
        yield self._batch()
        while True:
            try:
                async with asyncio.timeout(0.2):
                    batch = await queue.get()
            except TimeoutError:
                if self.silent:
                    continue
                batch = self._batch()
            if batch is None:
                return
            yield batch

    # --- running ----------------------------------------------------------------------------------

    async def _run(self, submit: Submit) -> None:
        try:
            if self.role is Role.PREFILL:
                await self._prefill(submit)
            else:
                await self._decode(submit)
        finally:
            self.running.pop(submit.key, None)

    async def _prefill(self, submit: Submit) -> None:
        index = len(submit.output_ids)
        start = self.fleet.now()
        await asyncio.sleep(self.prefill_delay_s)
        if self._scores(submit) or self._fails(submit, index):
            return
        finished = self._emit(submit, index)
        span = Span(phase=Phase.PREFILL, start=start, end=self.fleet.now(), place=self.name)
        moved = Span(
            phase=Phase.TRANSFER,
            start=span.end,
            end=self.fleet.now(),
            place=self.name,
            counts={"bytes": 4096},
        )
        self._publish(submit, spans=(SpanEvent(key=submit.key, spans=(span, moved)),))
        if not finished:
            self.fleet.commit(submit.key).set()

    async def _decode(self, submit: Submit) -> None:
        index = len(submit.output_ids)
        if submit.live:
            index = await self.fleet.moved(submit.key)
        elif submit.peer is not None:
            await self.fleet.commit(submit.key).wait()
            index += 1
        elif self._scores(submit):
            return
        while True:
            await asyncio.sleep(self.delay_s)
            if self._fails(submit, index) or self._emit(submit, index):
                return
            index += 1
            self.next_index[submit.key] = index
            if self.gate is not None:
                await self.gate.wait()

    def _scores(self, submit: Submit) -> bool:
        """Tell of the prompt in two parts that overlap; whether that is all there is to do."""
        count, ids = submit.sampling.prompt_logprobs, submit.prompt_ids
        if count is None:
            return False
        entries = tuple(stub_logprobs(token, count) for token in ids[1:])
        half = len(entries) // 2
        ends = submit.sampling.max_tokens == 0
        finish = FinishReason.LENGTH if ends else None
        if self.scores_before_death:
            self._publish(
                submit, scores=(ScoreEvent(key=submit.key, start=1, logprobs=entries[:half]),)
            )
            for worker in self.fleet.workers:
                worker.scores_before_death = False
            self.break_streams()
            return True
        for start, part, end in (
            (0, entries[:half], None),
            (half // 2, entries[half // 2 :], finish),
        ):
            event = ScoreEvent(key=submit.key, start=start + 1, logprobs=part, finish=end)
            self._publish(submit, scores=(event,))
        return ends

    def _fails(self, submit: Submit, index: int) -> bool:
        if self.fail_after is None or index < self.fail_after:
            return False
        if submit.key.attempt >= self.fail_attempts:
            return False
        failure = FailEvent(
            key=submit.key, error=self.fail_error.info(), retriable=self.fail_retriable
        )
        self._publish(submit, failures=(failure,))
        return True

    def _emit(self, submit: Submit, index: int) -> bool:
        token, count = self.script(submit)[index], submit.sampling.logprobs
        finish = None
        if submit.sampling.ends_with(token, index + 1):
            finish = FinishReason.STOP
        elif index + 1 >= submit.sampling.max_tokens:
            finish = FinishReason.LENGTH
        span = Span(phase=Phase.DECODE, start=self.fleet.now(), end=self.fleet.now())
        event = TokenEvent(
            key=submit.key,
            index=index,
            token=token,
            finish=finish,
            spans=(span,) if finish and self.role is Role.DECODE else (),
            logprobs=None if count is None else stub_logprobs(token, count),
        )
        prompts: tuple[PromptEvent, ...] = ()
        if self.cached_tokens is not None and index == len(submit.output_ids):
            prompts = (PromptEvent(key=submit.key, num_cached_tokens=self.cached_tokens),)
        self._publish(submit, tokens=(event,), prompts=prompts)
        return finish is not None

    def _publish(self, submit: Submit, **events: tuple[object, ...]) -> None:
        queue = self._streams.get(submit.router_id)
        if queue is not None:
            queue.put_nowait(self._batch(**events))

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            decode_step_s=self.decode_step_s,
            running=len(self.running),
            free_blocks=self.num_blocks if self.free_blocks is None else self.free_blocks,
            total_blocks=self.num_blocks,
            tokens_per_second=1000.0,
            prompt_tokens_per_second=self.prompt_rate,
            prompts=self.prompts,
            clock=self.fleet.now(),
        )

    def _batch(self, **events: object) -> EventBatch:
        return EventBatch(
            epoch=self.epoch,
            state=self.state,
            role=self.role,
            load=self._load(),
            **events,  # type: ignore[arg-type]
        )


class StubFleet:
    """Workers that know each other: prefill's commit reaches decode without a transfer."""

    def __init__(self, secret: bytes = b"secret") -> None:
        self.secret = secret
        self.workers: list[StubWorker] = []
        self._commits: dict[RequestKey, asyncio.Event] = {}
        self._moved: dict[RequestKey, asyncio.Future[int]] = {}

    async def add(self, role: Role, **settings: object) -> StubWorker:
        """Start one more worker."""
        name = f"{role.value}-{len(self.workers)}"
        worker = StubWorker(role=role, fleet=self, name=name, **settings)  # type: ignore[arg-type]
        await worker.start()
        self.workers.append(worker)
        return worker

    @property
    def refs(self) -> list[WorkerRef]:
        return [worker.ref for worker in self.workers if worker.ref is not None]

    def commit(self, key: RequestKey) -> asyncio.Event:
        """Set when prefill has committed `key`."""
        return self._commits.setdefault(key, asyncio.Event())

    def moved(self, key: RequestKey) -> asyncio.Future[int]:
        """The next token's index of a sequence that has moved under this key."""
        if key not in self._moved:
            self._moved[key] = asyncio.get_running_loop().create_future()
        return self._moved[key]

    def now(self) -> float:
        import time

        return time.time()

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers))
