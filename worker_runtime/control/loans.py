"""The event loop's half of loans: KV that workers lend each other (scheduling.peer_blocks)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from concurrency.event_loop import Tasks
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.handoffs import Handoffs
from protocol.errors import BatonError
from protocol.ids import RequestKey
from protocol.loans import LoanOffer, LoanRequest
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from rpc import methods
from rpc.methods import Handler, Method
from worker_runtime.scheduling.messages import (
    Borrow,
    Command,
    HandoffEnded,
    Lend,
    Lent,
    StepOutput,
)


class Loans:
    """Asks other workers for KV, and answers them. Either way the hand-off exists before the step
    thread hears of it, so that its end always reaches that."""

    def __init__(
        self,
        context: EndpointContext,
        ends: Handoffs,
        put: Callable[[Command], object],
        tasks: Tasks,
    ) -> None:
        """`put`: into the inbox of the step thread."""
        self._context = context
        self._ends = ends
        self._put = put
        self._tasks = tasks
        self._asked: dict[RequestKey, asyncio.Future[int]] = {}

    def handlers(
        self, name_blocks: Callable[[Submit], Awaitable[tuple[bytes, ...]]]
    ) -> dict[Method[Any, Any], Handler]:
        """What borrowers may call. `name_blocks`: names the full blocks of a prompt."""

        async def lend(request: LoanRequest) -> LoanOffer:
            return await self._lend(request, name_blocks)

        return {methods.LEND: lend}

    def carry_out(self, out: StepOutput) -> None:
        """Carry out what the step thread decided."""
        for borrow in out.borrows:
            self._borrow(borrow)
        for lent in out.lent:
            self._answer(lent.key, lent.num_tokens)

    def ended(self, key: RequestKey) -> None:
        """A hand-off is over without a commit."""
        self._answer(key, 0)

    # --- borrower -------------------------------------------------------------------------------

    def _borrow(self, borrow: Borrow) -> None:
        source, key = borrow.source, borrow.submit.key
        try:
            self._ends.receiver.offer(key, source.ticket, source.worker)
        except BatonError as error:
            self._put(HandoffEnded(key=key, error=error.info()))
        else:
            self._tasks.start(self._ask(borrow))

    async def _ask(self, borrow: Borrow) -> None:
        source, submit = borrow.source, borrow.submit
        request = LoanRequest(
            key=submit.key,
            ticket=source.ticket,
            borrower=self._context.ref,
            cache_salt=submit.cache_salt,
            tokens=submit.prompt_ids,
        )
        client = self._context.clients.get(source.worker.address)
        timeout_s = self._context.config.rpc_timeout_s
        try:
            offer = await client.call(methods.LEND, request, timeout_s=timeout_s)
        except BatonError as error:
            await self._ends.receiver.end(submit.key, False, error.info())
        else:
            self._put(Lent(key=submit.key, num_tokens=offer.num_tokens))

    # --- lender ---------------------------------------------------------------------------------

    async def _lend(
        self, request: LoanRequest, name_blocks: Callable[[Submit], Awaitable[tuple[bytes, ...]]]
    ) -> LoanOffer:
        """Raises StaleMessage for a bad ticket."""
        key, sender = request.key, self._ends.sender
        sender.expect(key, request.ticket, request.borrower)
        if key in self._asked:  # asked again meanwhile
            return LoanOffer(num_tokens=await asyncio.shield(self._asked[key]))
        leased = self._asked[key] = asyncio.get_running_loop().create_future()
        submit = Submit(
            key=key,
            router_id="",
            prompt_ids=request.tokens,
            sampling=SamplingParams(max_tokens=1),
            time_left_s=math.inf,
            cache_salt=request.cache_salt,
        )
        try:
            digests = await name_blocks(submit)
            if not leased.done():  # else the hand-off is over
                self._put(Lend(submit=submit, digests=digests))
            num_tokens = await leased
        finally:
            self._asked.pop(key, None)
        if not num_tokens:
            self._tasks.start(sender.end(key, released=True))
        return LoanOffer(num_tokens=num_tokens)

    def _answer(self, key: RequestKey, num_tokens: int) -> None:
        future = self._asked.get(key)
        if future is not None and not future.done():
            future.set_result(num_tokens)
