"""Moves one running output to another decode worker, KV and all, when its worker wants to be rid of
it: it drains, or has another role now. The output goes on meanwhile; a failed move changes
nothing and is tried again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from msgspec.structs import replace

from observability import metrics
from observability.logging import get_logger
from protocol.errors import BatonError, HandoffFailed
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import FailEvent, HandoffEnd, MoveRequest, Submit, Ticket, TokenEvent
from router.dispatch.attempt import Attempt
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.sequence_jobs import SequenceJob
from router.workers.event_sink import AttemptEvent
from router.workers.worker_client import WorkerClient
from rpc.methods import END, MOVE

log = get_logger(__name__)

#: Before a move that failed, or found no worker, is tried again, unless a worker joins; each pause
#: is twice as long as the one before.
_FIRST_PAUSE_S = 0.25
_MAX_PAUSE_S = 4.0


class Arrival:
    """The events of an output under the key that it has on its next worker: its attempt gets them
    once the first token has come from there (router.workers.event_sink.EventSink). `came`
    resolves to whether it has; False when the move failed before, by `error` if it was told."""

    def __init__(self, attempt: Attempt, ref: WorkerRef) -> None:
        self.came: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.error: BatonError | None = None
        self._attempt = attempt
        self._ref = ref

    @property
    def is_here(self) -> bool:
        return self.came.done() and not self.came.cancelled() and self.came.result()

    def on_token(self, event: TokenEvent, role: Role) -> None:
        if not self.came.done():
            self._attempt.holder, self._attempt.holder_key = self._ref.worker_id, event.key
            self.came.set_result(True)
        if self.is_here:
            self._attempt.on_token(event, role)

    def on_event(self, event: AttemptEvent, ref: WorkerRef) -> None:
        if self.is_here:
            self._attempt.on_event(event, ref)
        elif isinstance(event, FailEvent):
            self.error = event.error.to_error()
            self._fail(event.error.message)

    def on_lost(self, ref: WorkerRef, reason: str) -> None:
        if self.is_here:
            self._attempt.on_lost(ref, reason)
        else:
            self._fail(reason)

    def on_unload(self) -> None:
        if self.is_here:
            self._attempt.on_unload()

    def relocate(self) -> bool:
        return self.is_here and self._attempt.relocate()

    def _fail(self, reason: str) -> None:
        if not self.came.done():
            log.info("move failed", extra={"to": self._ref.worker_id, "reason": reason})
            self.came.set_result(False)


class Mover:
    """Keeps one attempt on a worker that wants it. `holder` decodes the output now. `places` are
    the workers that know it, with the keys that it has there: to be detached when it has ended.

    next_key: a new attempt number. submit: what another worker needs to go on under that key.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        job: SequenceJob,
        attempt: Attempt,
        holder: WorkerClient,
        *,
        next_key: Callable[[], RequestKey],
        submit: Callable[[RequestKey], Submit],
    ) -> None:
        self.holder = holder
        self.places: list[tuple[WorkerClient, RequestKey]] = []
        self._dispatcher = dispatcher
        self._job = job
        self._attempt = attempt
        self._next_key = next_key
        self._submit = submit
        self._task: asyncio.Task[None] | None = None
        attempt.on_unload = self.unload
        attempt.relocate = self.relocate

    def unload(self) -> None:
        """The holder may want to be rid of the output. Idempotent."""
        if self._task is None and self.holder.unloads and self._may_move:
            self._task = asyncio.create_task(self._run())

    def relocate(self) -> bool:
        """Try once to move, also if the holder would go on; whether that has begun."""
        if self._task is not None or not self._may_move or self._job.gap_s is not None:
            return False  # a move is a gap
        self._task = asyncio.create_task(self._run(once=True))
        return True

    def close(self) -> None:
        """The attempt is over: stop moving it. Breaks the circle of the two, which the garbage
        collector would have to find while every stream waits."""
        if self._task is not None:
            self._task.cancel()
        self._attempt.forget_mover()

    @property
    def _may_move(self) -> bool:
        attempt = self._attempt
        return attempt.decode_started is not None and not attempt.ended.done()

    async def _run(self, *, once: bool = False) -> None:
        if once:
            await self._move()
        workers, pause_s = self._dispatcher.workers, _FIRST_PAUSE_S
        while self.holder.unloads and not self._attempt.ended.done():
            if not await self._move():
                await workers.changed(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        self._task = None
        self.unload()  # if that came meanwhile

    async def _move(self) -> bool:
        """One try; whether the output has moved."""
        submit = self._submit(self._attempt.holder_key)
        num_tokens = len(submit.prompt_ids) + len(submit.output_ids)
        chosen = self._dispatcher.choose_receiver(
            num_tokens, len(submit.prompt_ids) + submit.sampling.max_tokens, source=self.holder
        )
        if chosen is None:
            return False
        target, view = chosen
        num_blocks = view.layout.pages_for(num_tokens)
        key, source = self._next_key(), self.holder
        arrival = Arrival(self._attempt, target.ref)
        target.attach(key, arrival, self._job.blocks, role=Role.DECODE, tokens=0, blocks=num_blocks)
        self.places.append((target, key))
        ticket = Ticket(
            key=key,
            sender_epoch=source.ref.epoch,
            receiver_epoch=target.ref.epoch,
            num_blocks=num_blocks,
            lifetime_s=submit.time_left_s,
        ).signed(self._dispatcher.secret)
        request = MoveRequest(
            key=self._attempt.holder_key,
            to=key,
            ticket=ticket,
            num_output=len(submit.output_ids),
            peer=target.ref,
        )
        self._attempt.moving = True
        try:
            await target.calls.submit(
                replace(submit, key=key, peer=source.ref, ticket=ticket, live=True)
            )
            await source.calls.call(MOVE, request)
            await arrival.came
        except BatonError as error:
            arrival.error = error
            log.info("move refused", extra={"to": target.ref.worker_id, "reason": error.message})
        self._attempt.moving = False
        if arrival.is_here:
            self.holder = target
            target.breaker.began(key, self._dispatcher.clock())
            self._dispatcher.metrics.count(metrics.MOVES, outcome="moved")
            return True
        self._dispatcher.metrics.count(metrics.MOVES, outcome="failed")
        if isinstance(arrival.error, HandoffFailed):
            target.breaker.failed(key, self._dispatcher.clock())
        if not target.connected:  # its peers may wait for it until the directory expires it
            lost = HandoffFailed(f"worker {target.ref.worker_id} is lost").info()
            end = HandoffEnd(
                key=key, epoch=target.ref.epoch, to_sender=True, released=False, error=lost
            )
            with contextlib.suppress(BatonError):
                await source.calls.call(END, end)
        target.detach(key, cancel=True)
        self.places.remove((target, key))
        self._attempt.stayed()
        return False
