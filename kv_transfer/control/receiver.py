"""Decode's end of every hand-off, on rank 0's event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Any

from kv_transfer.backends.host import may_share_host
from kv_transfer.config import ONE_SIDED
from kv_transfer.control.context import CallResult, EndpointContext, as_failure, first_error
from kv_transfer.control.endpoint import Endpoint
from kv_transfer.control.incoming import FinishedIncoming, Incoming, writer_stopped
from kv_transfer.control.listeners import ReceiverListener
from kv_transfer.control.receiver_channel import ReceiverChannels
from kv_transfer.data.rank_commands import ListenCommand, RankCommand
from kv_transfer.plan.block_grants import BlockGrants
from kv_transfer.plan.coverage import Tables, check_sizes, writable_blocks
from kv_transfer.plan.handoff_state import PiecesLost, Verdict
from kv_transfer.plan.reshard import check_layout
from kv_transfer.plan.states import GrantState
from protocol.errors import BatonError, ErrorInfo, HandoffFailed, StaleMessage
from protocol.ids import RequestKey, WorkerRef
from protocol.messages import (
    Ack,
    Commit,
    CommitNotice,
    Grant,
    HandoffEnd,
    LinkAddress,
    LinkOffer,
    OpenLinks,
    Piece,
    Ticket,
)
from protocol.states import TransferState
from rpc import methods
from rpc.methods import Handler, Method


class Receiver(Endpoint[Incoming, FinishedIncoming]):
    """Grants blocks to prefill workers and takes KV into them."""

    sends = False

    def __init__(self, context: EndpointContext, listener: ReceiverListener) -> None:
        super().__init__(context, Incoming)
        self._listener = listener
        self._links: tuple[LinkAddress, ...] = ()
        self._one_sided = False  # whether some link lets a sender write by itself
        self._grants = BlockGrants()
        self._channels = ReceiverChannels(
            context, self._tasks, self.stats, on_lost=self._check_later
        )

    async def start(self) -> None:
        """Make every rank listen for links. Raises HandoffFailed when one cannot."""
        results = await self._context.run_everywhere(RankCommand(listen=ListenCommand()))
        if (error := first_error(results)) is not None:
            raise HandoffFailed(f"a rank cannot listen: {error.message}")
        self._links = tuple(
            LinkAddress(rank=rank, backend=found.backend, endpoint=found.endpoint)
            for rank, result in enumerate(results)
            for found in result.listening
        )
        self._one_sided = any(link.backend in ONE_SIDED for link in self._links)

    def handlers(self) -> dict[Method[Any, Any], Handler]:
        """What prefill workers may call."""
        return {
            methods.OPEN_LINKS: self.on_open_links,
            methods.PIECE: self.on_piece,
            methods.COMMIT_NOTICE: self.on_commit_notice,
            methods.COMMIT: self.on_commit,
            methods.END: self.on_end,
        }

    def num_blocks(self, state: GrantState) -> int:
        """Blocks that are granted to hand-offs, or quarantined after them."""
        return self._grants.num_blocks(state)

    # --- from the worker ------------------------------------------------------------------------

    def offer(self, key: RequestKey, ticket: Ticket, peer: WorkerRef) -> None:
        """A request was submitted whose KV will come from `peer`. Holds no blocks. Raises
        StaleMessage for a bad ticket or an older attempt, and the error of a hand-off that prefill
        has ended already. Idempotent."""
        self._begin(key, ticket, peer)

    async def reserve(
        self,
        key: RequestKey,
        block_tables: Tables,
        num_cached_blocks: int,
        num_tokens: int | None = None,
    ) -> None:
        """Blocks are set aside for the KV of `num_tokens` tokens (None: all that the first KV group
        holds), in prompt order, the first `num_cached_blocks` filled already: grant them.

        Takes the blocks at once and returns when prefill has the grant. Never raises for a failure
        of the hand-off: then `ended` is called (unless it was) and `blocks_safe` gives the blocks
        back.
        """
        if num_tokens is None:
            num_tokens = len(block_tables[0]) * self._context.layout.block_size
        if self.grant(key, block_tables, num_cached_blocks, num_tokens) is not None:
            handoff = self._live[key]
            # Once pieces come, prefill has the grant whatever became of the reply.
            reserved = TransferState.RESERVED
            await self._send_grant(handoff, unless=lambda: not handoff.is_in(reserved))

    def grant(
        self, key: RequestKey, block_tables: Tables, num_cached: int, num_tokens: int
    ) -> Grant | None:
        """As `reserve`, but the caller brings the grant to the sender; None when the hand-off is
        over. Unless the sender takes it: `withdraw` or `end`."""
        handoff = self._live.get(key)
        if handoff is None:
            self._listener.blocks_safe(key, tuple(chain.from_iterable(block_tables)))
            return None
        if handoff.generation:
            raise ValueError(f"{key} has blocks already")
        try:
            self._reserve(handoff, block_tables, num_cached, num_tokens)
        except BatonError as error:
            self._finish(handoff, released=False, error=error.info(), tell=True)
            self._listener.blocks_safe(key, tuple(chain.from_iterable(block_tables)))
            return None
        return self._grant_of(handoff)

    def withdraw(self, key: RequestKey) -> bool:
        """The sender has said that it does not take the grant: its blocks are the caller's again,
        at once, and `blocks_safe` is not called. False when it is too late for that."""
        handoff = self._live.get(key)
        reserved = handoff is not None and handoff.is_in(TransferState.RESERVED)
        if handoff is None or not reserved or not handoff.generation:
            return False
        self._grants.close(handoff.generation)
        handoff.withdraw()
        handoff.check_by = None
        return True

    async def end(self, key: RequestKey, released: bool, error: ErrorInfo | None = None) -> None:
        """Leave a hand-off: not needed any more (`released`), or failed here. Prefill is told.

        After a commit it only gives the blocks back, through `blocks_safe`: for a worker that had
        stopped wanting the sequence when it learned of the commit. Ignored when it is over already.
        """
        handoff = self._live.get(key)
        if handoff is not None:
            self._finish(handoff, released=released, error=error, tell=True)
            return
        finished = self._finished.get(key)
        if finished is not None and finished.release():
            self._listener.blocks_safe(key, tuple(finished.block_ids))

    async def peer_lost(self, epoch: int) -> None:
        """The prefill worker of this epoch has left or is silent: end its hand-offs, close its
        channel. It may be frozen, and write when it thaws: until it confirms the end, blocks that
        it could write stay quarantined."""
        self._end_all(epoch, "is lost")
        await self._channels.close(epoch)

    # --- from prefill ---------------------------------------------------------------------------

    async def on_open_links(self, request: OpenLinks) -> LinkOffer:
        """A prefill worker builds its links ahead of hand-offs. Raises StaleMessage or
        HandoffFailed when the incarnation that it names, or its layout, cannot be used."""
        check_layout(self._context.layout, request.prefill_layout)
        if request.backend and request.backend not in ONE_SIDED:
            self._channels.accept(request)
        return LinkOffer(layout=self._context.layout, links=self._links)

    def on_piece(self, piece: Piece) -> Ack:
        """A piece is ready to move. The reply means that its receives are posted on every rank.

        Raises StaleMessage when ticket, epoch, generation or range are not those of a current
        hand-off: then nothing is posted and no block is touched. An error that names `incarnation`
        or `turn` asks for a newer one.
        """
        handoff = self._current(piece.key, piece.ticket)
        if piece.prefill.epoch != piece.ticket.sender_epoch:
            raise StaleMessage(f"piece of {piece.key} is from another epoch", param="epoch")
        handoff.check_current(piece.ticket, piece.generation)
        waiting = handoff.is_in(TransferState.RESERVED)
        self._channels.announced(handoff, piece)
        if waiting:
            self._start_lease(handoff)
        return Ack()

    def on_commit_notice(self, notice: CommitNotice) -> Ack:
        """A commit will follow soon. Ignored for a hand-off that is not in progress."""
        handoff = self._live.get(notice.key)
        if handoff is not None and handoff.peer.epoch == notice.epoch:
            self._listener.commit_announced(notice.key, notice.in_s)
        return Ack()

    def on_commit(self, commit: Commit) -> Ack | Coroutine[Any, Any, Ack]:
        """Everything was sent. The reply means that all of it arrived and decode owns the sequence.

        Waits for pieces that are arriving. Raises HandoffFailed naming what is missing or differs,
        and StaleMessage for a hand-off that is not current.
        """
        finished = self._finished.get(commit.key)
        if finished is not None and finished.proof == commit.proof:
            return Ack()
        handoff = self._current(commit.key, commit.ticket)
        handoff.check_current(commit.ticket, commit.generation)
        handoff.check_new(commit)
        self._channels.written(handoff, commit.written)
        if handoff.is_settled and not handoff.lost_pieces:
            return self._commit(handoff, commit)
        return self._commit_later(handoff, commit)

    async def _commit_later(self, handoff: Incoming, commit: Commit) -> Ack:
        try:
            await handoff.settle(self._config.op_timeout_s)
        except PiecesLost:  # the sender still has them
            handoff.num_refused = commit.number + 1
            raise
        except HandoffFailed as error:
            self._finish(handoff, released=False, error=error.info(), tell=False)
            raise
        return self._commit(handoff, commit)

    def _commit(self, handoff: Incoming, commit: Commit) -> Ack:
        try:
            if handoff.commit(commit) is Verdict.REPEAT:
                return Ack()
        except HandoffFailed as error:
            self._finish(handoff, released=False, error=error.info(), tell=False)
            raise
        self._grants.close(handoff.generation)
        self._retire(handoff)
        self.stats.committed += 1
        self._listener.committed(handoff.key, commit)
        return Ack()

    async def on_end(self, end: HandoffEnd) -> Ack:
        """Prefill leaves a hand-off."""
        handoff = self._live.get(end.key)
        if handoff is not None:
            if end.epoch != handoff.peer.epoch:
                raise StaleMessage(f"end of {end.key} is from another epoch", param="epoch")
            self._finish(handoff, released=end.released, error=end.error, tell=False, stopped=True)
        elif self._finished.get(end.key) is None:
            state = TransferState.RELEASED if end.released else TransferState.ABORTED
            self._finished.put(end.key, FinishedIncoming(end.epoch, end.error, state))
        return Ack()

    # --- one hand-off ---------------------------------------------------------------------------

    def _current(self, key: RequestKey, ticket: Ticket) -> Incoming:
        handoff = self._live.get(key)
        genuine = None if handoff is None else handoff.ticket
        self._context.check_ticket(ticket, key, ticket.sender_epoch, sends=False, genuine=genuine)
        if handoff is None:
            finished = self._finished.get(key)
            state = "unknown" if finished is None else finished.state
            raise StaleMessage(f"hand-off of {key} is {state}", param="key")
        return handoff

    def _reserve(
        self, handoff: Incoming, block_tables: Tables, num_cached: int, num_tokens: int
    ) -> None:
        layout = self._context.layout
        check_sizes(block_tables, num_cached, num_tokens, layout)
        writable = writable_blocks(block_tables, num_cached, num_tokens, layout)
        generation = self._grants.grant(writable)
        try:
            handoff.reserve(
                generation=generation,
                block_tables=block_tables,
                num_cached=num_cached,
                num_tokens=num_tokens,
                layout=layout,
            )
        except BatonError:
            self._grants.close(generation)
            raise
        self._check_later(handoff)

    async def _send_grant(
        self, handoff: Incoming, *, unless: Callable[[], bool], attempts: int | None = None
    ) -> None:
        """Send the grant; without an acknowledgement end the hand-off, `unless` that is settled."""
        grant = self._grant_of(handoff)
        answer = await self._context.call(handoff.peer, methods.GRANT, grant, attempts)
        if answer.error is not None and not unless():
            error = as_failure(answer.error, "prefill worker").info()
            self._finish(handoff, released=False, error=error, tell=answer.uncertain)

    def _grant_of(self, handoff: Incoming) -> Grant:
        return Grant(
            key=handoff.key,
            ticket=handoff.ticket,
            decode=self._context.ref,
            generation=handoff.generation,
            block_tables=handoff.block_tables,
            num_cached_blocks=handoff.num_cached,
            num_tokens=handoff.num_tokens,
            layout=self._context.layout,
            fingerprint=self._context.fingerprint,
            links=self._links,
        )

    def _check_later(self, handoff: Incoming) -> None:
        """Ask prefill whether it still works on a hand-off, unless a piece comes before: after
        `lease_s` while the prompt waits in its queue, after `repair_s` when a piece was lost."""
        delay = self._config.repair_s if handoff.lost_pieces else self._config.lease_s
        handoff.check_by = self._clock.monotonic() + delay
        self._deadlines.add(handoff.check_by, handoff.key)

    def _check(self, handoff: Incoming, now: float) -> None:
        due = handoff.check_by is not None and handoff.check_by <= now
        if due and handoff.waits_for_sender:
            self._tasks.start(self._check_sender(handoff))

    async def _check_sender(self, handoff: Incoming) -> None:
        """Send the grant again: prefill acknowledges it while the hand-off is in progress there.
        About a lost piece it is asked once, because it was silent for `repair_s` already."""
        attempts = 1 if handoff.lost_pieces else None
        self._check_later(handoff)
        await self._send_grant(
            handoff, unless=lambda: not handoff.waits_for_sender, attempts=attempts
        )

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
        unless it has `stopped`, as its own End message says."""
        if not self._move_to_end(handoff, released=released, error=error):
            return
        handoff.changed.set()
        if handoff.generation:
            self._grants.quarantine(handoff.generation)
        self._listener.ended(handoff.key, error)
        if handoff.generation and not stopped and self._may_write(handoff):
            self._tasks.start(self._await_writer(handoff))
            return
        if tell:
            self._tasks.start(self._leave(handoff))
        if handoff.generation == 0:
            return
        if handoff.num_moving == 0:
            self._become_safe(handoff)
        else:
            self._tasks.start(self._fence(handoff))

    def _may_write(self, handoff: Incoming) -> bool:
        """Whether the sender writes into the blocks by itself, or may: before the first piece its
        backend is unknown, but only a process on this host can map a pool of this host."""
        if handoff.backend:
            return handoff.backend in ONE_SIDED
        return self._one_sided and may_share_host(handoff.peer.process)

    async def _await_writer(self, handoff: Incoming) -> None:
        """Nothing here can stop a sender that writes by itself: it has to confirm that it has."""
        await writer_stopped(lambda: self._leave(handoff), handoff.peer, self._context)
        await self._fence(handoff)

    def _retire(self, handoff: Incoming) -> None:
        del self._live[handoff.key]
        self._finished.put(handoff.key, handoff.finished())

    async def _fence(self, handoff: Incoming) -> None:
        """Wait until no rank writes the blocks. A rank that cannot be reached has to end its
        receives first."""
        if not await self._context.fence(self._context.ref.epoch, handoff.generation):
            while handoff.num_moving:
                handoff.changed.clear()
                await handoff.changed.wait()
        self._become_safe(handoff)

    def _become_safe(self, handoff: Incoming) -> None:
        self._grants.close(handoff.generation)
        self._listener.blocks_safe(handoff.key, handoff.block_ids)

    async def _leave(self, handoff: Incoming) -> CallResult:
        end = handoff.end_message(self._context.ref.epoch, to_sender=True)
        return await self._send_end(handoff.peer, end)
