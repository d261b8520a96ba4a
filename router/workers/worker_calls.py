"""What a router asks of one worker: submits, the cancels behind them, whether it stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from observability.logging import get_logger
from protocol.errors import BatonError, DeadlineExceeded, Unavailable
from protocol.ids import RequestKey, WorkerRef
from protocol.messages import Ack, Cancel, StatusQuery, Submit
from router.config import RouterConfig
from router.workers.bookkeeping import Reservations
from rpc.client import ControlClient
from rpc.methods import CANCEL, STATUS, SUBMIT, Method, Rep, Req

log = get_logger(__name__)

_CANCEL_TRIES = 3
#: A worker that runs says so within this time, whatever else it does.
_ANSWER_S = 0.5


class WorkerCalls:
    """Calls over one connection, on which they reach the worker in their order.

    `client` is set while the worker is followed. `still`: it seems to stand still, until it reports
    again. `on_done` is called when a submit or a cancel has ended.
    """

    def __init__(
        self,
        ref: WorkerRef,
        *,
        config: RouterConfig,
        reservations: Reservations,
        on_done: Callable[[], None],
    ) -> None:
        self.client: ControlClient | None = None
        self.still = False
        self._ref = ref
        self._config = config
        self._reservations = reservations
        self._on_done = on_done
        self._submits: dict[RequestKey, asyncio.Task[Ack]] = {}
        self._cancels: set[RequestKey] = set()
        self._cancel_after_submit: set[RequestKey] = set()
        self._canceller: asyncio.Task[None] | None = None
        self._question: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a submit or a cancel is in flight."""
        return bool(self._submits or self._cancels)

    async def call(
        self, method: Method[Req, Rep], request: Req, timeout_s: float | None = None
    ) -> Rep:
        """What the worker answers, or raises; within `submit_timeout_s` unless a time is given."""
        if self.client is None:
            raise Unavailable(f"worker {self._ref.worker_id} is not connected")
        timeout_s = timeout_s or self._config.submit_timeout_s
        return await self.client.call(method, request, timeout_s=timeout_s)

    def submit(self, submit: Submit) -> asyncio.Future[Ack]:
        """Submit an attempt. Awaiting raises what the worker answers; if that is cancelled, the
        call still runs to its end, so that the cancel of the attempt cannot overtake it."""
        key = submit.key
        task = self._submits[key] = asyncio.create_task(self.call(SUBMIT, submit))
        task.add_done_callback(partial(self._submitted, key))
        return asyncio.shield(task)

    def cancel(self, key: RequestKey) -> None:
        """Send a cancel: soon, together with others, after the submit. A worker that stands still
        answers no submit: the call of it is cancelled, too, and when the worker goes on it finds
        the cancel before it has begun with the prompt."""
        if key in self._submits:
            self._cancel_after_submit.add(key)
            if self.still:
                self._submits[key].cancel()
        elif self.client is None:
            self._reservations.cancelled((key,), 0)
        else:
            self._cancels.add(key)
            if self._canceller is None:
                self._canceller = asyncio.create_task(self._send_cancels())

    def ask(self) -> None:
        """Find out whether it runs, unless that is being found out."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask())

    def stands_still(self) -> None:
        """It does not answer, or its reports are missing."""
        if not self.still:
            log.warning("worker stands still", extra={"worker": self._ref.worker_id})
        self.still = True

    async def _ask(self) -> None:
        try:
            await self.call(STATUS, StatusQuery(), _ANSWER_S)
        except DeadlineExceeded:
            self.stands_still()
        except BatonError:
            pass  # its stream ends, or has ended

    def _submitted(self, key: RequestKey, task: asyncio.Task[Ack]) -> None:
        self._submits.pop(key, None)
        if not task.cancelled() and task.exception() is None:
            self._reservations.submitted(key, task.result().num_commands)
        if key in self._cancel_after_submit:
            self._cancel_after_submit.discard(key)
            self.cancel(key)
        self._on_done()

    async def _send_cancels(self) -> None:
        tries = 0
        while self._cancels and self.client is not None and tries < _CANCEL_TRIES:
            keys = tuple(self._cancels)
            try:
                ack = await self.call(CANCEL, Cancel(keys=keys))
            except BatonError as error:
                tries += 1
                log.warning(
                    "cancel failed", extra={"worker": self._ref.worker_id, "error": error.message}
                )
            else:
                tries = 0
                self._cancels.difference_update(keys)
                self._reservations.cancelled(keys, ack.num_commands)
        self._reservations.cancelled(self._cancels, 0)
        self._cancels.clear()
        self._canceller = None
        self._on_done()
