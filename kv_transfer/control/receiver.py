"""Decode's side of every hand-off, on rank 0's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from kv_transfer.config import ONE_SIDED
from kv_transfer.control.arrivals import Arrivals
from kv_transfer.control.calls import CallResult, as_failure
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.endpoint import Endpoint
from kv_transfer.control.incoming import Incoming, Settled, grant_message, settled
from kv_transfer.control.listeners import ReceiverListener
from kv_transfer.control.receiver_channel import listen
from kv_transfer.plan.block_grants import BlockGrants, Holding
from kv_transfer.plan.handoff_state import InboundHandoff, PiecesLost, Verdict
from kv_transfer.plan.reshard import check_layout
from protocol.errors import BatonError, ErrorInfo, HandoffFailed, Internal, StaleMessage
from protocol.ids import RequestKey, WorkerRef
from protocol.messages import Ack, Commit, HandoffEnd, LinkAddress, Meeting, Piece, Welcome
from protocol.states import TransferState
from protocol.ticket import Ticket
from rpc import methods
from rpc.methods import Handler, Method


class Receiver(Endpoint[Incoming, Settled]):
    """Grants blocks to prefill workers and takes KV into them."""

    def __init__(self, party: EndpointContext, listener: ReceiverListener) -> None:
        super().__init__(party)
        self._listener = listener
        self._links: tuple[LinkAddress, ...] = ()
        self._one_sided = False
        self._credits = BlockGrants()
        self._arrivals = Arrivals(party, self._tasks, self.stats, lost=self._repair_later)

    async def start(self) -> None:
        """Make every rank listen for links. Raises HandoffFailed when one cannot."""
        self._links = await listen(self._me.ranks, self._me.layout.tp_size)
        self._one_sided = any(link.backend in ONE_SIDED for link in self._links)

    def handlers(self) -> dict[Method[Any, Any], Handler]:
        """What prefill workers may call."""
        return {
            methods.MEET: self.on_meet,
            methods.PIECE: self.on_piece,
            methods.COMMIT: self.on_commit,
            methods.END: self.on_end,
        }

    def num_blocks(self, holding: Holding) -> int:
        """Blocks that are granted to hand-offs, or quarantined after them."""
        return self._credits.count(holding)

    # --- from the worker ------------------------------------------------------------------------

    def offer(self, key: RequestKey, ticket: Ticket, peer: WorkerRef) -> None:
        """A request was submitted whose KV will come from `peer`. Holds no blocks. Raises
        StaleMessage for a bad ticket or an older attempt, and the error of a hand-off that prefill
        has ended already. Idempotent."""
        self._begin(key, ticket, peer)

    async def reserve(
        self,
        key: RequestKey,
        block_ids: tuple[int, ...],
        num_cached_blocks: int,
        num_tokens: int | None = None,
    ) -> None:
        """Blocks are set aside for the KV of `num_tokens` tokens (None: all that they hold), in
        prompt order, the first `num_cached_blocks` filled already: grant them.

        Takes the blocks at once and returns when prefill has the grant. Never raises for what goes
        wrong with the hand-off: then `ended` is called (unless it was) and `blocks_safe` gives them
        back.
        """
        handoff = self._live.get(key)
        if handoff is None:
            self._listener.blocks_safe(key, block_ids)
            return
        lease = handoff.lease
        if not lease.is_in(TransferState.OFFERED):
            raise ValueError(f"{key} has blocks already")
        try:
            if num_tokens is None:
                num_tokens = len(block_ids) * self._me.layout.block_size
            self._reserve(handoff, block_ids, num_cached_blocks, num_tokens)
        except BatonError as error:
            self._finish(handoff, released=False, error=error.info(), tell=True)
            self._listener.blocks_safe(key, block_ids)
            return
        # Once pieces come, prefill has the grant whatever became of the reply.
        await self._call_grant(handoff, unless=lambda: not lease.is_in(TransferState.RESERVED))

    async def end(self, key: RequestKey, released: bool, error: ErrorInfo | None = None) -> None:
        """Leave a hand-off: not needed any more (`released`), or failed here. Prefill is told.

        After a commit it only gives the blocks back, through `blocks_safe`: for a worker that had
        stopped wanting the sequence when it learned of the commit. Ignored when it is over already.
        """
        handoff = self._live.get(key)
        if handoff is not None:
            self._finish(handoff, released=released, error=error, tell=True)
            return
        settled = self._past.get(key)
        if settled is not None and settled.state is TransferState.COMMITTED:
            settled.state = TransferState.RELEASED
            self._listener.blocks_safe(key, tuple(settled.block_ids))

    async def peer_lost(self, epoch: int) -> None:
        """The prefill worker of this epoch has left or is silent: end what it was to send, drop its
        links. It may be frozen, and write when it thaws: until it says, its blocks stay
        quarantined."""
        self._end_all(epoch, "is lost")
        await self._arrivals.forget(epoch)

    # --- from prefill ---------------------------------------------------------------------------

    async def on_meet(self, meeting: Meeting) -> Welcome:
        """A prefill worker wants its links to be ready before it hands over. Raises StaleMessage or
        HandoffFailed when the link that it names, or its layout, cannot be used."""
        check_layout(self._me.layout, meeting.prefill_layout)
        if meeting.backend and meeting.backend not in ONE_SIDED:
            self._arrivals.prepare(meeting)
        return Welcome(layout=self._me.layout, links=self._links)

    def on_piece(self, piece: Piece) -> Ack:
        """A piece is ready to move. The reply means that its receives are posted on every rank.

        Raises StaleMessage when ticket, epoch, generation or range are not those of a current
        hand-off: then nothing is posted and no block is touched. One that names `link` asks for a
        newer link.
        """
        handoff = self._current(piece.key, piece.ticket)
        if piece.prefill.epoch != piece.ticket.prefill_epoch:
            raise StaleMessage(f"piece of {piece.key} is from another incarnation", param="epoch")
        handoff.lease.check_current(piece.ticket, piece.generation)
        self._arrivals.announced(handoff, piece)
        return Ack()

    def on_commit(self, commit: Commit) -> Ack | Coroutine[Any, Any, Ack]:
        """Everything was sent. The reply means that all of it arrived and decode owns the sequence.

        Waits for what is still arriving. Raises HandoffFailed naming what is missing or differs,
        and StaleMessage for a hand-off that is not current.
        """
        settled = self._past.get(commit.key)
        if settled is not None and settled.proof == commit.proof:
            return Ack()
        handoff = self._current(commit.key, commit.ticket)
        lease = handoff.lease
        lease.check_current(commit.ticket, commit.generation)
        lease.check_new(commit)
        self._arrivals.written(handoff, commit.written)
        if lease.is_settled and not lease.lost_pieces:
            return self._commit(handoff, commit)
        return self._commit_later(handoff, commit)

    async def _commit_later(self, handoff: Incoming, commit: Commit) -> Ack:
        try:
            await handoff.settle(self._config.op_timeout_s)
        except PiecesLost:  # the sender has them still
            handoff.lease.num_refused = commit.number + 1
            raise
        except HandoffFailed as error:
            self._finish(handoff, released=False, error=error.info(), tell=False)
            raise
        return self._commit(handoff, commit)

    def _commit(self, handoff: Incoming, commit: Commit) -> Ack:
        lease = handoff.lease
        try:
            if lease.commit(commit) is Verdict.REPEAT:
                return Ack()
        except HandoffFailed as error:
            self._finish(handoff, released=False, error=error.info(), tell=False)
            raise
        self._credits.close(lease.generation)
        self._retire(handoff)
        self.stats.committed += 1
        self._listener.committed(lease.key, commit)
        return Ack()

    async def on_end(self, end: HandoffEnd) -> Ack:
        """Prefill leaves a hand-off."""
        handoff = self._live.get(end.key)
        if handoff is not None:
            if end.epoch != handoff.lease.peer.epoch:
                raise StaleMessage(f"end of {end.key} is from another incarnation", param="epoch")
            self._finish(handoff, released=end.released, error=end.error, tell=False, stopped=True)
        elif self._past.get(end.key) is None:
            state = TransferState.RELEASED if end.released else TransferState.ABORTED
            self._past.put(end.key, Settled(end.epoch, end.error, state))
        return Ack()

    # --- one hand-off ---------------------------------------------------------------------------

    def _record(
        self, *, key: RequestKey, ticket: Ticket, peer: WorkerRef, deadline: float
    ) -> Incoming:
        return Incoming(InboundHandoff(key=key, ticket=ticket, peer=peer, deadline=deadline))

    def _current(self, key: RequestKey, ticket: Ticket) -> Incoming:
        handoff = self._live.get(key)
        genuine = None if handoff is None else handoff.lease.ticket
        self._me.check_ticket(ticket, key, ticket.prefill_epoch, genuine=genuine)
        if handoff is None:
            settled = self._past.get(key)
            state = "unknown" if settled is None else settled.state
            raise StaleMessage(f"hand-off of {key} is {state}", param="key")
        return handoff

    def _reserve(
        self, handoff: Incoming, block_ids: tuple[int, ...], num_cached: int, num_tokens: int
    ) -> None:
        lease = handoff.lease
        generation = self._credits.grant(block_ids[num_cached:])
        try:
            lease.reserve(
                generation=generation,
                block_ids=block_ids,
                num_cached=num_cached,
                num_tokens=num_tokens,
                layout=self._me.layout,
            )
        except BatonError:
            self._credits.close(generation)
            raise
        self._shorten(lease)

    def _look_at(self, handoff: Incoming, now: float) -> None:
        if handoff.deadline <= now:
            self._tasks.start(self._repair(handoff))

    async def _repair(self, handoff: Incoming) -> None:
        """A lost piece has not come again: prefill may not know yet, or be dead. Its answer to the
        grant that it had before tells. It is asked once: it was silent for long already."""
        lease = handoff.lease
        self._repair_later(handoff)
        await self._call_grant(handoff, unless=lambda: not lease.lost_pieces, attempts=1)

    def _repair_later(self, handoff: Incoming) -> None:
        handoff.repair_by = self._clock.monotonic() + self._config.repair_s
        self._deadlines.add(handoff.repair_by, handoff.lease.key)

    async def _call_grant(
        self, handoff: Incoming, *, unless: Callable[[], bool], attempts: int | None = None
    ) -> None:
        """Send the grant; without an acknowledgement end the hand-off, unless that is settled."""
        lease = handoff.lease
        grant = grant_message(lease, self._me, self._links)
        answer = await self._me.call(lease.peer, methods.GRANT, grant, attempts)
        if answer.error is not None and not unless():
            error = as_failure(answer.error, "prefill worker").info()
            self._finish(handoff, released=False, error=error, tell=answer.uncertain)

    def _end_all(self, epoch: int, why: str) -> None:
        for handoff in [h for h in self._live.values() if h.lease.peer.epoch == epoch]:
            error = HandoffFailed(f"prefill worker {handoff.lease.peer.worker_id} {why}")
            self._finish(handoff, released=False, error=error.info(), tell=False)

    def _finish(
        self,
        handoff: Incoming,
        *,
        released: bool,
        error: ErrorInfo | None,
        tell: bool,
        stopped: bool = False,
    ) -> None:
        """`tell` the sender. One that may write by itself has to confirm the end in any case,
        unless it said already that it has `stopped`."""
        lease = handoff.lease
        if not self._ends(handoff, released=released, error=error):
            return
        handoff.changed.set()
        if lease.generation:
            self._credits.quarantine(lease.generation)
        self._listener.ended(lease.key, error)
        if lease.generation and self._one_sided and not stopped and may_write(handoff):
            self._tasks.start(self._confirm(handoff))
            return
        if tell:
            self._tasks.start(self._leave(lease))
        if lease.generation == 0:
            return
        if handoff.moving == 0:
            self._become_safe(lease)
        else:
            self._tasks.start(self._fence(handoff))

    async def _confirm(self, handoff: Incoming) -> None:
        """Nothing here stops a sender that writes by itself: it has to say that it has stopped."""
        lease = handoff.lease
        await writer_stopped(lambda: self._leave(lease), self._me)
        await self._fence(handoff)

    def _retire(self, handoff: Incoming) -> None:
        lease = handoff.lease
        del self._live[lease.key]
        self._past.put(lease.key, settled(lease))

    async def _fence(self, handoff: Incoming) -> None:
        """Wait until no rank writes the blocks. One that cannot be asked has to end its receives
        first."""
        lease = handoff.lease
        if not await self._me.fence(self._me.ref.epoch, lease.generation):
            while handoff.moving:
                handoff.changed.clear()
                await handoff.changed.wait()
        self._become_safe(lease)

    def _become_safe(self, lease: InboundHandoff) -> None:
        self._credits.close(lease.generation)
        self._listener.blocks_safe(lease.key, lease.block_ids)

    async def _leave(self, lease: InboundHandoff) -> CallResult:
        return await self._tell(lease.peer, lease.end_message(self._me.ref.epoch))


def may_write(handoff: Incoming) -> bool:
    """Whether the sender writes by itself, or may: it has not said yet."""
    return not handoff.backend or handoff.backend in ONE_SIDED


async def writer_stopped(ask: Callable[[], Awaitable[CallResult]], party: EndpointContext) -> None:
    """Ask again and again, however long it takes: a frozen sender may still write when it thaws.

    Nobody listening at its address (rpc.client: an error that names it) for an operation's time
    counts as dead: a frozen process still listens.
    """
    absent_since: float | None = None
    while True:
        answer = await ask()
        if answer.error is None:
            return
        if answer.refused and not isinstance(answer.error, Internal):
            return  # its address belongs to another incarnation
        now = party.clock.monotonic()
        if answer.error.param != "address":
            absent_since = None
        elif absent_since is None:
            absent_since = now
        elif now - absent_since >= party.config.op_timeout_s:
            return
        await asyncio.sleep(party.config.repair_s)
