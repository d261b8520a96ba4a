"""Workers without engines, for tests.support.router_world: they keep the rules of `decode_worker`
and `prefill_worker` about who owns a sequence and who tells what; when they do what is random."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    HandoffFailed,
    Overloaded,
    Unavailable,
)
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import (
    HINT_BYTES,
    CacheChange,
    KVLayout,
    chain_seed,
    extend_chain,
    hints,
)
from protocol.loads import QueuedPrompt
from protocol.messages import (
    Ack,
    Cancel,
    EventBatch,
    FailEvent,
    HandoffEnd,
    MoveRequest,
    PromptEvent,
    SpanEvent,
    Submit,
    TokenEvent,
    WorkerLoad,
    WorkerStatus,
)
from protocol.states import FinishReason, WorkerState
from protocol.timeline import Phase, Span
from rpc import methods
from tests.support.blocks import FINGERPRINT

SECRET = b"secret"
LAYOUT = KVLayout(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    block_size=16,
    num_blocks=4096,
    dtype="float32",
    rank_heads=((0, 1),),
)
#: The longest prompt, of which others are the beginning, and the hints of its blocks.
PROMPT = tuple(range(1920))
_DIGESTS: list[bytes] = []
extend_chain(_DIGESTS, PROMPT, block_size=16, seed=chain_seed(FINGERPRINT))
HINTS = hints(_DIGESTS)
_CANCELLED = Cancelled("given back").info()


class World(Protocol):
    """What workers and their network share."""

    by_epoch: dict[int, RandomWorker]
    by_address: dict[str, RandomWorker]
    given_back: Counter[str]
    begun: Counter[str]
    fault_rate: float

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...
    def choose(self, *values: Any) -> Any: ...
    def delay(self, at_most: float) -> float: ...
    async def pause(self, at_most: float) -> None: ...
    def fails(self, share: float) -> bool: ...
    def tokens_of(self, key: RequestKey) -> tuple[int, ...]: ...
    def of(self, ref: WorkerRef | None) -> RandomWorker | None: ...


@dataclass(eq=False)
class Held:
    """A sequence on a worker. begun: nothing of it can be given back. runs: it decodes. to: where
    it is about to leave for."""

    submit: Submit
    prefills: bool
    num_output: int
    begun: bool = False
    runs: bool = False
    to: MoveRequest | None = None
    task: asyncio.Task[None] | None = None


class RandomWorker:
    """What a router sees of a worker."""

    def __init__(self, world: World, role: Role, number: int) -> None:
        self.world = world
        self.role = role
        self.state = WorkerState.READY
        name = f"w{number}"
        self.ref = WorkerRef(worker_id=name, epoch=100 + number, role=role, address=f"{name}:1")
        self.held: dict[RequestKey, Held] = {}
        self.events: asyncio.Queue[EventBatch | None] | None = None
        self.alive = True
        self.named = True
        self.num_commands = 0
        self.num_submitted = 0
        self.hold_first = world.choose(True, False)
        self.caches = world.choose(True, False)
        self._awake = asyncio.Event()
        self._awake.set()

    def stand_still(self, for_s: float) -> None:
        """Do and say nothing for a while, like a stopped process: what comes meanwhile waits."""
        self._awake.clear()
        self.world.loop.call_later(for_s, self._awake.set)

    def die(self) -> None:
        self.alive = False
        self._awake.set()
        self.lose_stream()

    async def awake(self) -> None:
        await self._awake.wait()

    async def _pause(self, at_most: float) -> None:
        await self.world.pause(at_most)
        await self.awake()

    # --- what it is asked -----------------------------------------------------------------------

    def call(self, method: Any, request: Any) -> Any:
        handlers: dict[Any, Callable[[Any], Any]] = {
            methods.STATUS: lambda _query: self._status(),
            methods.SUBMIT: self._submit,
            methods.CANCEL: self._cancel,
            methods.MOVE: self._move,
            methods.END: self._end,
        }
        return handlers[method](request)

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            ref=self.ref,
            state=self.state,
            role=self.role,
            load=self._load(),
            layout=LAYOUT,
            fingerprint=FINGERPRINT,
            precision="",
            max_model_len=1 << 16,
            max_prompt_tokens=1 << 15,
            steps=1,
            last_step_age_s=0.0,
        )

    def _submit(self, submit: Submit) -> Ack:
        if self.events is None or self.state is not WorkerState.READY:
            raise Unavailable("not open")
        if self.world.fails(0.3):
            raise Overloaded("full", retry_after_s=1.0)
        self.num_submitted += 1
        assert submit.key not in self.held
        assert submit.time_left_s > 0
        assert len(submit.output_ids) < submit.sampling.max_tokens
        assert submit.output_ids == self.world.tokens_of(submit.key)[: len(submit.output_ids)]
        prefills = submit.ticket is not None and submit.ticket.sender_epoch == self.ref.epoch
        held = Held(submit, prefills, len(submit.output_ids))
        self.held[submit.key] = held
        if prefills or submit.peer is None:
            held.task = self.world.start(self._compute(held))
        self.world.loop.call_later(submit.time_left_s, self._expire, held)
        self.num_commands += 1
        return Ack(num_commands=self.num_commands)

    def _expire(self, held: Held) -> None:
        if self.held.get(held.submit.key) is held:
            error = DeadlineExceeded("late")
            self.tell(
                failures=(FailEvent(key=held.submit.key, error=error.info(), retriable=False),)
            )
            self.drop(held)

    def _cancel(self, cancel: Cancel) -> Ack:
        self.num_commands += 1
        for key in cancel.keys:
            held = self.held.get(key)
            if held is not None and not (cancel.unless_begun and held.begun):
                if cancel.unless_begun:
                    if held.submit.peer is not None and not held.prefills:
                        continue
                    failure = FailEvent(key=key, error=_CANCELLED, retriable=True, given_back=True)
                    self.tell(failures=(failure,))
                    self.world.given_back[key.request_id] += 1
                self.drop(held)
        return Ack(num_commands=self.num_commands)

    def _move(self, request: MoveRequest) -> Ack:
        held = self.held.get(request.key)
        assert held is None or held.to is None or self.world.fault_rate, "it moves already"
        if held is None or not held.runs or held.to is not None:
            self._tell_peer(request.peer.epoch, request.to, HandoffFailed("does not run here"))
        else:
            held.to = request
            self.world.start(self._leave(held, request))
        return Ack()

    def _end(self, end: HandoffEnd) -> Ack:
        for held in self.held.values():
            if held.to is not None and held.to.to == end.key:
                held.to = None
        return Ack()

    # --- what it does ---------------------------------------------------------------------------

    async def _compute(self, held: Held) -> None:
        """The prompt; then output, here or on its peer, which has set blocks aside before."""
        await self._pause(0.3)
        while held.prefills and (peer := self.world.of(held.submit.peer)) is not None:
            if held.submit.key in peer.held:
                break
            await asyncio.sleep(0.01)
        await self.awake()
        held.begun = True
        self.world.begun[held.submit.key.request_id] += 1
        self.tell()
        await self._pause(0.1)
        if self._fails(held):
            return
        key = held.submit.key
        self.tell(prompts=(PromptEvent(key=key, num_cached_tokens=0),))
        if not held.prefills:
            await self._decode(held)
            return
        holds = self.hold_first and not held.num_output
        if self._ends_next(held) or not holds:
            self._emit(held)
            if key not in self.held:
                return
        else:
            held.num_output += 1
        await self._pause(0.05)
        if self._fails(held):
            return
        peer = self.world.of(held.submit.peer)
        if peer is not None:
            await peer.awake()
        other = None if peer is None else peer.held.get(key)
        if peer is None or other is None:  # its end is on the way, or it is lost
            self._fail(held, HandoffFailed("no peer"))
            return
        other.num_output = held.num_output
        other.task = peer.world.start(peer._decode(other, tells_first=holds))
        if self.alive:
            self.tell(spans=(self._spans(key),))
        del self.held[key]

    async def _decode(self, held: Held, *, tells_first: bool = False) -> None:
        if tells_first:
            self.tell(prompts=(PromptEvent(key=held.submit.key, num_cached_tokens=0),))
            held.num_output -= 1
            self._emit(held)
        held.runs = True
        while held.submit.key in self.held:
            await self._pause(0.02)
            if not held.runs:
                await asyncio.sleep(0.01)
            elif self._fails(held, 0.01):
                return
            else:
                self._emit(held)

    async def _leave(self, held: Held, request: MoveRequest) -> None:
        """Its full blocks go; it stops; the rest goes."""
        await self._pause(0.05)
        if self.held.get(request.key) is not held or held.to is not request:
            return
        held.runs = False
        await self._pause(0.03)
        peer = self.world.of(request.peer)
        if peer is not None:
            await peer.awake()
        if self.held.get(request.key) is not held:
            return
        other = None if peer is None else peer.held.get(request.to)
        if peer is None or other is None or held.to is not request:
            held.to = None
            held.runs = True
            if peer is None and self.world.choose(True, False):
                self._fail(held, HandoffFailed("no known owner"))
            return
        other.num_output = held.num_output
        other.task = self.world.start(peer._decode(other))
        self.tell(spans=(self._spans(request.key),))
        self._forget(held)

    def _ends_next(self, held: Held) -> bool:
        return held.num_output + 1 == len(self.world.tokens_of(held.submit.key))

    def _emit(self, held: Held) -> None:
        key, index = held.submit.key, held.num_output
        finish = FinishReason.LENGTH if self._ends_next(held) else None
        token = self.world.tokens_of(key)[index]
        held.num_output += 1
        spans = () if finish is None else self._spans(key).spans
        event = TokenEvent(key=key, index=index, token=token, finish=finish, spans=spans)
        self.tell(tokens=(event,))
        if finish is not None:
            self._tell_partners(held, None)
            self._forget(held)

    def _fails(self, held: Held, share: float = 1.0) -> bool:
        """Whether it is gone, or fails now."""
        if held.submit.key not in self.held:
            return True
        if self.world.fails(share):
            self._fail(held, HandoffFailed("at random"))
            return True
        return False

    def _fail(self, held: Held, error: BatonError) -> None:
        failure = FailEvent(key=held.submit.key, error=error.info(), retriable=True)
        self.tell(failures=(failure,))
        self._tell_partners(held, error)
        self._forget(held)

    def drop(self, held: Held) -> None:
        """It is cancelled."""
        self._tell_partners(held, None)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        self.held.pop(held.submit.key, None)
        task = held.task
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _tell_partners(self, held: Held, error: BatonError | None) -> None:
        """The other end of its hand-off, or of its move, hears of its end."""
        submit = held.submit
        if submit.peer is not None and not (held.runs and not held.prefills):
            self._tell_peer(submit.peer.epoch, submit.key, error)
        if held.to is not None:
            self._tell_peer(held.to.peer.epoch, held.to.to, error)

    def _tell_peer(self, epoch: int, key: RequestKey, error: BatonError | None) -> None:
        self.world.start(self._told(epoch, key, error))

    async def _told(self, epoch: int, key: RequestKey, error: BatonError | None) -> None:
        await self.world.pause(0.01)
        peer = self.world.by_epoch.get(epoch)
        if peer is None:
            return
        await peer.awake()
        if not peer.alive:
            return
        for other in list(peer.held.values()):
            if other.to is not None and other.to.to == key:  # it goes on here
                other.to, other.runs = None, True
        found = peer.held.get(key)
        if found is not None and not (found.runs and not found.prefills):
            if error is not None:
                peer.tell(failures=(FailEvent(key=key, error=error.info(), retriable=True),))
            peer._forget(found)

    # --- what it says ---------------------------------------------------------------------------

    def tell(self, **events: Any) -> None:
        if self.events is not None:
            self.events.put_nowait(self.batch(**events))

    def batch(self, **events: Any) -> EventBatch:
        return EventBatch(
            epoch=self.ref.epoch,
            state=self.state,
            role=self.role,
            load=self._load(),
            cache=self._cache() if self.caches else None,
            **events,
        )

    @staticmethod
    def _spans(key: RequestKey) -> SpanEvent:
        return SpanEvent(key=key, spans=(Span(phase=Phase.DECODE, start=1.0, end=2.0),))

    def _load(self) -> WorkerLoad:
        now = self.world.loop.time()
        waiting = (h for h in self.held.values() if h.prefills or h.submit.peer is None)
        return WorkerLoad(
            running=len(self.held),
            free_blocks=LAYOUT.num_blocks,
            total_blocks=LAYOUT.num_blocks,
            tokens_per_second=1000.0,
            prompt_tokens_per_second=1000.0,
            num_commands=self.num_commands,
            clock=now,
            prompts=tuple(
                QueuedPrompt(
                    key=h.submit.key,
                    left_tokens=10,
                    due_at=now + 0.2,
                    ends_at=now + self.world.choose(0.05, 0.5),
                    begun=h.begun,
                )
                for h in waiting
                if not h.num_output
            ),
        )

    def _cache(self) -> CacheChange | None:
        """What it has cached or evicted since the last report: blocks of prompts, at random."""
        if self.world.choose(True, True, True, True, False):
            return None
        start, end = sorted(self.world.choose(0, 1, 70, 100, 120) for _ in range(2))
        told = HINTS[HINT_BYTES * start : HINT_BYTES * end]
        added = self.world.choose(told, b"")
        reset = self.world.choose(*[False] * 9, True)
        return CacheChange(reset=reset, added=added, removed=b"" if added else told)

    async def leave(self) -> None:
        """Drain, and end."""
        self.tell()
        while self.held:
            await asyncio.sleep(0.01)
        await self._pause(0.02)
        if self.events is not None:
            self.events.put_nowait(None)
        self.alive = False

    async def miss_stream(self, events: asyncio.Queue[EventBatch | None]) -> None:
        """Find the router's stream broken, once it runs."""
        await self.awake()
        if self.events is events:
            self.lose_stream()

    def lose_stream(self) -> None:
        """The router's stream breaks: its requests here are cancelled."""
        events, self.events = self.events, None
        if events is not None:
            events.put_nowait(None)
        for held in list(self.held.values()):
            self.drop(held)


class RandomClient:
    """In place of rpc.client.ControlClient: calls arrive in order, some late, until a close."""

    world: World

    def __init__(self, address: str, *, secret: bytes) -> None:
        assert secret == SECRET
        self._address = address
        self._arrives = 0.0
        self._calls: set[asyncio.Task[Any]] = set()

    def _worker(self) -> RandomWorker:
        worker = self.world.by_address.get(self._address)
        if worker is None or not worker.alive:
            raise Unavailable("cannot connect", param="address")
        return worker

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        delay_s = self.world.delay(4.0 if self.world.fails(0.2) else 0.003)
        self._arrives = max(self._arrives + 1e-4, self.world.loop.time() + delay_s)
        task = asyncio.create_task(self._deliver(method, request, self._arrives))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise DeadlineExceeded("no answer in time") from None
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise Unavailable("the connection was lost") from None

    async def _deliver(self, method: Any, request: Any, at: float) -> Any:
        await asyncio.sleep(at - self.world.loop.time())
        await self._worker().awake()
        answer = self._worker().call(method, request)
        await self.world.pause(4.0 if self.world.fails(0.2) else 0.003)
        return answer

    async def stream(self, method: Any, _request: Any) -> AsyncIterator[EventBatch]:
        assert method is methods.EVENTS
        await self.world.pause(0.003)
        worker = self._worker()
        await worker.awake()
        worker.lose_stream()
        worker.events = queue = asyncio.Queue()
        try:
            yield worker.batch()
            while True:
                try:
                    async with asyncio.timeout(0.5):
                        batch = await queue.get()
                except TimeoutError:
                    batch = worker.batch()
                if batch is None:
                    return
                await self.world.pause(self.world.choose(*[0.003] * 30, *[0.03] * 5, 0.5))
                await worker.awake()
                yield batch
        finally:
            self.world.start(worker.miss_stream(queue))

    async def close(self) -> None:
        for task in self._calls:
            task.cancel()
