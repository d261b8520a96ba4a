"""The event loop's half of loans: KV that workers lend each other (scheduling.peer_blocks)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from concurrency.event_loop import Tasks
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.handoffs import Handoffs
from protocol.errors import BatonError, InvalidRequest
from protocol.ids import RequestKey
from protocol.loans import LoanOffer, LoanRequest
from protocol.messages import Grant, PrefixSource, Submit
from protocol.sampling import SamplingParams
from rpc import methods
from rpc.methods import Handler, Method
from worker_runtime.scheduling.messages import (
    BlocksSafe,
    Borrow,
    Command,
    Granted,
    HandoffEnded,
    Lend,
    Lent,
    StepOutput,
)

NameBlocks = Callable[[Submit], Awaitable[tuple[bytes, ...]]]


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
        self._asked: dict[RequestKey, tuple[asyncio.Future[int], Grant]] = {}

    def handlers(self, name_blocks: NameBlocks) -> dict[Method[Any, Any], Handler]:
        """What borrowers may call. `name_blocks`: names the full blocks of a prompt."""
        return {methods.LEND: partial(self._lend, name_blocks)}

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
        source, reserve, receiver = borrow.source, borrow.reserve, self._ends.receiver
        try:
            receiver.offer(reserve.key, source.ticket, source.worker)
        except BatonError as error:
            self._put(HandoffEnded(key=reserve.key, error=error.info()))
            self._put(BlocksSafe(key=reserve.key))
            return
        grant = receiver.grant(
            reserve.key, reserve.block_tables, reserve.num_cached_blocks, reserve.num_tokens
        )
        if grant is not None:
            self._tasks.start(self._ask(borrow, grant))

    async def _ask(self, borrow: Borrow, grant: Grant) -> None:
        source, submit, names = borrow.source, borrow.submit, borrow.names
        try:
            try:
                offer = await self._call(source, LoanRequest(grant=grant, names=names))
            except InvalidRequest as error:
                if error.param != "tokens":
                    raise
                tokens = (*submit.prompt_ids, *submit.output_ids)[: grant.num_tokens + 1]
                salt = submit.cache_salt
                request = LoanRequest(grant=grant, cache_salt=salt, names=names, tokens=tokens)
                offer = await self._call(source, request)
        except BatonError as error:
            await self._ends.receiver.end(grant.key, False, error.info())
        else:
            if offer.num_tokens < grant.num_tokens and self._ends.receiver.withdraw(grant.key):
                self._put(Lent(key=grant.key, num_tokens=offer.num_tokens))

    async def _call(self, source: PrefixSource, request: LoanRequest) -> LoanOffer:
        client = self._context.clients.get(source.worker.address)
        timeout_s = self._context.config.rpc_timeout_s
        return await client.call(methods.LEND, request, timeout_s=timeout_s)

    # --- lender ---------------------------------------------------------------------------------

    def _lend(
        self, name_blocks: NameBlocks, request: LoanRequest
    ) -> Coroutine[Any, Any, LoanOffer]:
        """Begin at once, before the task that answers. Raises StaleMessage for a bad ticket,
        InvalidRequest without the tokens that are needed, and as `Sender.on_grant`."""
        grant = request.grant
        key, size = grant.key, self._context.layout.block_size
        named = grant.layout.block_size == size
        if not (named or request.tokens):
            raise InvalidRequest(f"blocks here have {size} tokens", param="tokens")
        self._ends.sender.expect(key, grant.ticket, grant.decode)
        if key in self._asked:  # asked again meanwhile
            return self._offer(key, self._asked[key][0])
        leased: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked[key] = leased, grant
        if named:
            self._put(Lend(digests=request.names, granted=granted_of(grant)))
            return self._offer(key, leased)
        submit = Submit(
            key=key,
            router_id="",
            prompt_ids=request.tokens,
            sampling=SamplingParams(max_tokens=1),
            time_left_s=math.inf,
            cache_salt=request.cache_salt,
        )
        return self._offer(key, leased, partial(name_blocks, submit))

    async def _offer(
        self,
        key: RequestKey,
        leased: asyncio.Future[int],
        name: Callable[[], Awaitable[tuple[bytes, ...]]] | None = None,
    ) -> LoanOffer:
        """`name`: the blocks, which have another size here than the borrower's. What the step
        thread leases counts even if the borrower has stopped asking."""
        if name is not None:
            digests = await name()
            if key in self._asked:  # else the hand-off is over
                self._put(Lend(digests=digests, granted=granted_of(self._asked[key][1])))
        num_tokens = await asyncio.shield(leased)
        if not num_tokens:
            self._tasks.start(self._ends.sender.end(key, released=True))
        return LoanOffer(num_tokens=num_tokens)

    def _answer(self, key: RequestKey, num_tokens: int) -> None:
        """So many tokens are leased, or none any more. All that was granted: take the grant before
        what is leased is pushed."""
        leased, grant = self._asked.pop(key, (None, None))
        if leased is None or grant is None:
            return
        try:
            if num_tokens >= grant.num_tokens:
                self._ends.sender.take(grant)
        except BatonError as error:
            leased.set_exception(error)
        else:
            leased.set_result(num_tokens)


def granted_of(grant: Grant) -> Granted:
    """What a scheduler has to know of a grant."""
    return Granted(
        key=grant.key,
        num_cached_tokens=grant.num_cached_blocks * grant.layout.block_size,
        num_tokens=grant.num_tokens,
    )
