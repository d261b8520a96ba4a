"""One worker as this router sees it: its event stream, its load, its requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial

from msgspec.structs import replace

from concurrency.event_loop import silence_limit
from observability.logging import get_logger
from protocol.errors import BatonError, StaleMessage, Unavailable
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import (
    EventBatch,
    FailEvent,
    PromptEvent,
    ScoreEvent,
    StatusQuery,
    Subscribe,
    TokenEvent,
    WorkerLoad,
    WorkerStatus,
)
from protocol.states import WorkerState
from router.config import RouterConfig
from router.workers.bookkeeping import (
    CircuitBreaker,
    PrefixView,
    PromptBlocks,
    Reservations,
)
from router.workers.event_sink import AttemptEvent, EventSink
from router.workers.policy import WorkerView
from router.workers.worker_calls import WorkerCalls
from rpc.client import ControlClient
from rpc.methods import EVENTS, STATUS

log = get_logger(__name__)

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
_STATUS_S = 1.0
#: Tokens of a batch that are delivered before the event loop does anything else.
_TOKENS_AT_ONCE = 64


class WorkerClient:
    """Follows one incarnation of a worker over one persistent event stream.

    When the stream ends, is silent too long or names another epoch, the worker counts as lost and
    every attempt on it ends; the worker cancels the requests of a router whose stream ended. The
    stream is opened again, with pauses, until `leave` was called and no attempt is left.
    """

    def __init__(
        self,
        ref: WorkerRef,
        *,
        router_id: str,
        secret: bytes,
        config: RouterConfig,
        on_change: Callable[[WorkerClient], None],
        on_report: Callable[[], None],
        on_mark: Callable[[WorkerClient, int, bool], None] = lambda _client, _mark, _here: None,
    ) -> None:
        """`on_mark`: told of marks of blocks (router.workers.holders) that it has or has not."""
        self.ref = ref
        self.load = WorkerLoad()
        self.status: WorkerStatus | None = None
        self.reservations = Reservations()
        self.breaker = CircuitBreaker()
        self.prefix = PrefixView(partial(on_mark, self))
        self.connected = False
        self.leaving = False
        self.closed = False
        self.role = ref.role  # its own word of now
        self.state = WorkerState.READY
        self._router_id = router_id
        self._secret = secret
        self._config = config
        self._on_change = on_change
        self._on_report = on_report
        self.heard_at = 0.0  # monotonic time of the latest report
        self.calls = WorkerCalls(
            ref, config=config, reservations=self.reservations, on_done=self._stop_if_done
        )
        # With the worker as it takes part: the role is that in the attempt.
        self._sinks: dict[RequestKey, tuple[EventSink, WorkerRef]] = {}
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"worker {ref.worker_id}")

    # --- choosing ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        ready = self.state is WorkerState.READY
        return self.connected and not self.leaving and ready

    def takes(self, now: float) -> bool:
        """Whether it can be given something now, which may fail."""
        return not self.calls.still and self.breaker.allows(now)

    @property
    def unloads(self) -> bool:
        """Whether it wants to be rid of the sequences that it decodes."""
        return not self.ready or self.role is not Role.DECODE

    def view(self, prompt: PromptBlocks, *, failing: bool = False) -> WorkerView:
        """This worker as the policy sees it for a prompt. Only while connected."""
        assert self.status is not None
        unseen, layout = self.reservations, self.status.layout
        held, expected = self.prefix.counts(self.blocks_of(prompt))
        return WorkerView(
            ref=self.ref,
            load=self.load,
            capacity=self.capacity,
            layout=layout,
            fingerprint=self.status.fingerprint,
            unseen_sequences=unseen.sequences,
            unseen_tokens=unseen.tokens,
            unseen_blocks=unseen.blocks,
            cached_tokens=layout.block_size * held,
            expected_tokens=layout.block_size * expected,
            failing=failing,
        )

    def blocks_of(self, prompt: PromptBlocks) -> Sequence[int]:
        """Hints of the prompt's blocks, as this worker names them; none before it has reported."""
        if self.status is None or not self.prefix.reports:
            return ()
        return prompt.hints(self.status.fingerprint, self.status.layout.block_size)

    def marks_of(self, prompt: PromptBlocks) -> Sequence[int]:
        """The marks among them."""
        if self.status is None or not self.prefix.reports:
            return ()
        return prompt.marks(self.status.fingerprint, self.status.layout.block_size)

    @property
    def free_tokens(self) -> int:
        """Tokens of new sequences that its KV pool has blocks for; with KV windows, of one sequence
        alone."""
        if self.status is None:
            return 0
        free_blocks = self.load.free_blocks - self.reservations.blocks
        return self.status.layout.tokens_in(max(0, free_blocks))

    def backlog_tokens(self, size: int) -> int:
        """Prompt tokens that it computes before a prompt of a size class."""
        load = self.load
        reported = sum(load.backlog[: size + 1]) if load.backlog else load.waiting_tokens
        return max(0, reported + self.reservations.tokens_up_to(size))

    @property
    def max_model_len(self) -> int:
        return 0 if self.status is None else self.status.max_model_len

    @property
    def capacity(self) -> int:
        """Tokens of the largest sequence, prompt and output together."""
        return 0 if self.status is None else self.status.max_prompt_tokens + 1

    # --- requests ---------------------------------------------------------------------------------

    def attach(
        self,
        key: RequestKey,
        sink: EventSink,
        prompt: PromptBlocks,
        *,
        role: Role,
        tokens: int,
        blocks: int,
    ) -> None:
        """Deliver the events of an attempt, in which the worker has this role, to `sink` and
        reserve `tokens` to compute and `blocks` to hold. Undone by `detach`."""
        self._sinks[key] = sink, replace(self.ref, role=role)
        self.breaker.started(key)
        self.prefix.expect(key, self.blocks_of(prompt))
        self.reservations.reserve(key, tokens=tokens, blocks=blocks)

    def detach(self, key: RequestKey, *, cancel: bool) -> None:
        """Forget an attempt; with `cancel` the worker is told to stop it. Idempotent."""
        self._sinks.pop(key, None)
        self.reservations.release(key, cancel=cancel)
        self.prefix.release(key)
        self.breaker.ended(key)
        if cancel:
            self.calls.cancel(key)
        self._stop_if_done()

    # --- the stream -------------------------------------------------------------------------------

    def spread(self, count: int) -> None:
        """Have so many of the sequences that it decodes move to other workers."""
        for sink, ref in list(self._sinks.values()):
            if count and ref.role is Role.DECODE:
                count -= sink.relocate()

    def stay(self) -> bool:
        """Undo `leave`, if it is not too late."""
        if not self._stop.is_set():
            self.leaving = False
        return not self.leaving

    def leave(self) -> None:
        """Take nothing new; stop following once the attempts on it have ended."""
        self.leaving = True
        self._on_change(self)
        self._unload()
        self._stop_if_done()

    async def close(self) -> None:
        """Stop at once; attempts on it count as lost."""
        self.leaving = True
        self._stop.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def refresh(self) -> None:
        """Ask for the worker's status; the previous one stays if there is no answer in time."""
        if self.connected:
            try:
                self.status = await self.calls.call(STATUS, StatusQuery(), _STATUS_S)
            except BatonError as error:
                log.info("no status", extra={"worker": self.ref.worker_id, "error": error.message})

    def _stop_if_done(self) -> None:
        busy = self._sinks or self.calls.busy
        if self.leaving and not busy and not self._stop.is_set():
            self._stop.set()
            self._task.cancel()

    async def _run(self) -> None:
        pause = _FIRST_RETRY_S
        try:
            while not self._stop.is_set():
                reason = await self._connect_and_follow()
                pause = _FIRST_RETRY_S if self.connected else pause
                self._lost(reason)
                if self.leaving:
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_RETRY_S)
        finally:
            self.closed = True
            self._lost("no longer followed")
            self._on_change(self)

    async def _connect_and_follow(self) -> str:
        """Follow the worker until it is lost. Returns the reason."""
        client = self.calls.client = ControlClient(self.ref.address, secret=self._secret)
        try:
            await self._follow(client)
            return "event stream ended"
        except TimeoutError:
            return f"silent for {self._config.silence_s} s"
        except BatonError as error:
            return error.message
        except Exception as error:
            log.exception("following a worker failed", extra={"worker": self.ref.worker_id})
            return f"{type(error).__name__}: {error}"
        finally:
            self.calls.client = None
            await client.close()

    async def _follow(self, client: ControlClient) -> None:
        status = await client.call(STATUS, StatusQuery(), timeout_s=self._config.connect_timeout_s)
        if status.ref.epoch != self.ref.epoch:
            raise StaleMessage(f"epoch is {status.ref.epoch}, expected {self.ref.epoch}")
        if status.state is not WorkerState.READY:
            raise Unavailable(f"worker is {status.state}")
        self.status = status
        async with (
            silence_limit(self._config.silence_s, on_half=self.calls.stands_still) as heard,
            aclosing(client.stream(EVENTS, Subscribe(router_id=self._router_id))) as batches,  # type: ignore[type-var]
        ):
            async for batch in batches:
                heard()
                await self._take(batch)

    async def _take(self, batch: EventBatch) -> None:
        if batch.epoch != self.ref.epoch:
            raise StaleMessage(f"epoch is {batch.epoch}, expected {self.ref.epoch}")
        self.load, self.heard_at = batch.load, time.monotonic()
        self.calls.still = False
        before = self.role, self.state
        self.role, self.state = batch.role, batch.state
        self.reservations.reported(batch.load.num_commands)
        if not self.connected:
            self.connected = True
            log.info("worker joined", extra={"worker": self.ref.worker_id, "role": self.role})
            self._on_change(self)
        elif before != (self.role, self.state):
            self._on_change(self)
            self._unload()
        if batch.cache is not None:
            self.prefix.take(batch.cache)
        await self._deliver(batch)

    def _unload(self) -> None:
        """Tell the attempts on it when it wants to be rid of them."""
        if self.unloads:
            for sink, _ in list(self._sinks.values()):
                sink.on_unload()

    async def _deliver(self, batch: EventBatch) -> None:
        """Each event to the sink of its attempt, if that is still attached. Between parts of a
        large batch the event loop writes the tokens delivered and takes new requests."""
        self._deliver_events((*batch.prompts, *batch.scores))
        for start in range(0, len(batch.tokens), _TOKENS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            self._deliver_tokens(batch.tokens[start : start + _TOKENS_AT_ONCE])
        self._deliver_events((*batch.spans, *batch.failures))
        self._on_report()

    def _deliver_tokens(self, tokens: tuple[TokenEvent, ...]) -> None:
        sinks = self._sinks
        for token in tokens:
            found = sinks.get(token.key)
            if found is not None:
                self.reservations.computed(token.key)
                sink, ref = found
                sink.on_token(token, ref.role)

    def _deliver_events(self, events: Sequence[AttemptEvent]) -> None:
        for event in events:
            found = self._sinks.get(event.key)
            if found is None:
                continue
            sink, ref = found
            if isinstance(event, PromptEvent | ScoreEvent):
                self.reservations.computed(event.key)
            elif isinstance(event, FailEvent):
                self.reservations.release(event.key)
            sink.on_event(event, ref)

    def _lost(self, reason: str) -> None:
        was_connected, self.connected = self.connected, False
        self.load = WorkerLoad()
        self.reservations.clear()
        self.prefix.forget()
        if was_connected:
            if self._stop.is_set():
                log.info("worker left", extra={"worker": self.ref.worker_id})
            else:
                log.warning("worker lost", extra={"worker": self.ref.worker_id, "reason": reason})
            self._on_change(self)
        else:
            log.info("no worker yet", extra={"worker": self.ref.worker_id, "reason": reason})
        for sink, ref in list(self._sinks.values()):
            sink.on_lost(ref, reason)
