"""Prefill's side of every hand-off, on rank 0's event loop."""

from __future__ import annotations

from typing import Any

from kv_transfer.config import ONE_SIDED
from kv_transfer.control.calls import as_failure
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.endpoint import Endpoint
from kv_transfer.control.finished_handoffs import BoundedMap
from kv_transfer.control.link_warmup import meet
from kv_transfer.control.listeners import SenderListener, TransferReport
from kv_transfer.control.outgoing import Finished, Outgoing, PieceOut
from kv_transfer.control.rank_channel import totals
from kv_transfer.control.sender_channel import SenderChannels
from kv_transfer.plan.coverage import Area
from kv_transfer.plan.handoff_state import OVER, OutboundHandoff, Verdict, lost_sequences
from kv_transfer.plan.reshard import cells_per_piece, kv_bytes, layer_groups
from protocol.errors import BatonError, ErrorInfo, HandoffFailed, StaleMessage
from protocol.ids import RequestKey, WorkerRef
from protocol.kv_layout import Cells
from protocol.messages import Ack, Grant, HandoffEnd
from protocol.states import TransferState
from protocol.ticket import Ticket
from rpc import methods
from rpc.methods import Handler, Method


class Sender(Endpoint[Outgoing, Finished]):
    """Sends finished KV blocks to decode workers."""

    def __init__(self, party: EndpointContext, listener: SenderListener) -> None:
        super().__init__(party)
        self._listener = listener
        self._early: BoundedMap[RequestKey, Grant] = BoundedMap(party.config.remembered)
        self._channels = SenderChannels(party, self._tasks, self.stats)

    def handlers(self) -> dict[Method[Any, Any], Handler]:
        """What decode workers may call."""
        return {methods.GRANT: self.on_grant, methods.END: self.on_end}

    # --- from the worker ------------------------------------------------------------------------

    async def meet(self, decode: WorkerRef) -> None:
        """Get the links to a decode worker ready, once, before hand-offs need them. Never
        raises."""
        if self._channels.lacks(decode.epoch):
            await meet(self._me, self._channels.get(decode))

    def expect(self, key: RequestKey, ticket: Ticket, decode: WorkerRef) -> None:
        """A request was submitted whose KV will go to `decode`; its grant may already be here, or
        come as long as the ticket is good. Raises StaleMessage for a bad ticket or an older
        attempt, and the error of a hand-off that decode has ended before it began. Idempotent."""
        if self._begin(key, ticket, decode) and (early := self._early.take(key)):
            self._tasks.start(self._take_early(early))  # decode was quicker than the router

    def push(
        self,
        key: RequestKey,
        block_ids: tuple[int, ...],
        first_block: int,
        *,
        after: int = 0,
    ) -> None:
        """Send `block_ids`, finished blocks first_block, first_block + 1, ... of the sequence here.
        Returns at once; the data leaves in the order of the pushes. With `after`, the blocks are
        finished by that step of the engine, which runs: each layer leaves behind it.

        The blocks must stay as they are until `committed` or `ended`. What decode has already of
        them is skipped. A push for a hand-off that is over is ignored; one that was never granted,
        or that repeats blocks, raises StaleMessage.
        """
        handoff = self._live.get(key)
        if handoff is None:
            return
        layout = self._me.layout
        groups = [layout.num_layers]
        if after and handoff.backend not in ONE_SIDED:  # one that writes does so by itself
            num_tokens = len(block_ids) * layout.block_size
            heads = layout.num_kv_heads
            size = kv_bytes(layout, num_tokens=num_tokens, num_layers=1, num_heads=heads)
            groups = layer_groups(layout.num_layers, size)
        per_block = layout.block_size // max(1, handoff.lease.cell_size)
        first_layer = 0
        for count in groups:
            area = Area(
                first_cell=first_block * per_block,
                num_cells=len(block_ids) * per_block,
                first_layer=first_layer,
                num_layers=count,
            )
            self._push(handoff, area, block_ids, after)
            first_layer += count

    def _push(self, handoff: Outgoing, area: Area, block_ids: tuple[int, ...], after: int) -> None:
        lease = handoff.lease
        for sequence, part in lease.push(area, max_cells=handoff.max_cells):
            cells = Cells.within(
                block_ids,
                self._me.layout.block_size,
                size=lease.cell_size,
                first=part.first_cell - area.first_cell,
                count=part.num_cells,
            )
            piece = PieceOut(
                handoff=handoff,
                me=self._me.ref,
                layout=self._me.layout,
                sequence=sequence,
                area=part,
                cells=cells,
                after=after,
            )
            handoff.pieces[sequence] = piece
            self._send(piece)

    def commit(self, key: RequestKey, first_token: int) -> None:
        """Everything was pushed and token 1 is known: commit once all of it is out. Returns at
        once. Ignored for a hand-off that is over; raises ValueError when blocks are missing."""
        handoff = self._live.get(key)
        if handoff is not None:
            handoff.lease.committing(first_token)
            if not handoff.out:
                self._tasks.start(self._commit(handoff))

    async def end(self, key: RequestKey, released: bool, error: ErrorInfo | None = None) -> None:
        """Leave a hand-off: not needed any more (`released`), or failed here. `ended` is called as
        soon as no source block is being read, and decode is told. Ignored when it is over
        already."""
        handoff = self._live.get(key)
        if handoff is not None:
            self._finish(handoff, released=released, error=error, tell=True)
            await handoff.quiet.wait()

    async def peer_lost(self, epoch: int) -> None:
        """The decode worker of this epoch is gone: end what was meant for it, drop its links."""
        self._end_all(epoch, "is lost")
        await self._channels.forget(epoch)

    # --- from decode ----------------------------------------------------------------------------

    def on_grant(self, grant: Grant) -> Ack:
        """Decode holds blocks for a request. Raises StaleMessage when it names another incarnation,
        ticket or generation, and HandoffFailed naming the field in which the two KV layouts
        differ."""
        handoff = self._live.get(grant.key)
        genuine = None if handoff is None else handoff.lease.ticket
        self._me.check_ticket(grant.ticket, grant.key, grant.decode.epoch, genuine=genuine)
        finished = self._past.get(grant.key)
        if finished is not None and finished.peer_epoch == grant.decode.epoch:
            raise StaleMessage(f"hand-off of {grant.key} is over", param="key")
        if handoff is None:
            self._early.put(grant.key, grant)
            return Ack()
        if handoff.lease.grant(grant, self._me.layout.block_size) is Verdict.REPEAT:
            return Ack()
        try:
            self._fit(handoff, grant)
        except HandoffFailed as error:
            self._finish(handoff, released=False, error=error.info(), tell=False)
            raise
        self._listener.granted(grant.key, grant)
        return Ack()

    async def on_end(self, end: HandoffEnd) -> Ack:
        """Decode leaves a hand-off. The reply means that nothing more will be written for it."""
        handoff = self._live.get(end.key)
        if handoff is not None:
            if end.epoch != handoff.lease.peer.epoch:
                raise StaleMessage(f"end of {end.key} is from another incarnation", param="epoch")
            self._finish(handoff, released=end.released, error=end.error, tell=False)
            await handoff.quiet.wait()
            return Ack()
        finished = self._past.get(end.key)
        if finished is None:
            self._early.take(end.key)
            self._past.put(end.key, Finished(end.epoch, end.error, None))
        elif finished.quiet is not None:
            await finished.quiet.wait()
        return Ack()

    # --- one hand-off ---------------------------------------------------------------------------

    def _record(
        self, *, key: RequestKey, ticket: Ticket, peer: WorkerRef, deadline: float
    ) -> Outgoing:
        return Outgoing(OutboundHandoff(key=key, ticket=ticket, peer=peer, deadline=deadline))

    async def _take_early(self, grant: Grant) -> None:
        try:
            self.on_grant(grant)
        except BatonError as error:
            # The grant was acknowledged when it came: its refusal has to be told by hand.
            handoff = self._live.get(grant.key)
            if handoff is not None:
                self._finish(handoff, released=False, error=error.info(), tell=True)
            else:
                epoch, info = self._me.ref.epoch, error.info()
                end = HandoffEnd(key=grant.key, epoch=epoch, released=False, error=info)
                await self._tell(grant.decode, end)

    def _fit(self, handoff: Outgoing, grant: Grant) -> None:
        channel = self._channels.get(grant.decode)
        handoff.backend, handoff.parts = channel.route(grant)
        handoff.max_cells = cells_per_piece(
            self._me.layout, handoff.lease.cell_size, self._config.piece_bytes(handoff.backend)
        )
        handoff.has_channel = True
        channel.users += 1
        self._shorten(handoff.lease)

    def _send(self, piece: PieceOut) -> None:
        piece.handoff.out.add(piece.sequence)
        self._tasks.start(self._deliver(piece))

    async def _deliver(self, piece: PieceOut) -> None:
        """Send a piece; if a commit waits for it, and for no other, that too."""
        handoff = piece.handoff
        lease = handoff.lease
        channel = self._channels.get(lease.peer)
        if handoff.started is None:
            handoff.started = self._clock.wall()
        try:
            outcomes = await channel.deliver(piece)
        except BatonError as error:
            if error.param == "backend":  # the next hand-off to this worker tries another way
                channel.refuse(handoff.backend)
            failure = as_failure(error, "decode worker").info()
            self._finish(handoff, released=False, error=failure, tell=True)
            return
        num_bytes, checksum = totals(outcomes)
        lease.sent(piece.sequence, num_bytes=num_bytes, checksum=checksum)
        self.stats.num_bytes += num_bytes
        self.stats.num_pieces += 1
        handoff.out.remove(piece.sequence)
        if lease.first_token is not None and not handoff.out:
            await self._commit(handoff)

    async def _commit(self, handoff: Outgoing) -> None:
        """Everything is out. Pieces that decode lacks are sent again, and then this once more."""
        lease = handoff.lease
        if lease.state in OVER:
            return
        request = lease.commit_request(handoff.written, handoff.commits)
        answer = await self._me.call(lease.peer, methods.COMMIT, request)
        if lease.is_in(*OVER):  # ended meanwhile; decode keeps the sequence if it had committed
            return
        handoff.commits += 1
        pieces, lost = handoff.pieces, lost_sequences(answer.error)
        again = [pieces[sequence] for sequence in lost if sequence in pieces]
        if again and handoff.commits < self._config.piece_attempts:
            for piece in again:
                self._send(piece)
            return
        if answer.error is not None:
            error = as_failure(answer.error, "decode worker").info()
            self._finish(handoff, released=False, error=error, tell=answer.uncertain or bool(lost))
            return
        started = handoff.started or self._clock.wall()
        lease.move_to(TransferState.COMMITTED)
        self.stats.committed += 1
        self._retire(handoff)
        handoff.quiet.set()
        report = TransferReport(
            num_bytes=lease.num_bytes,
            num_pieces=lease.num_pieces,
            start=started,
            end=self._clock.wall(),
        )
        self._listener.committed(lease.key, report)

    def _end_all(self, epoch: int, why: str) -> None:
        for handoff in [h for h in self._live.values() if h.lease.peer.epoch == epoch]:
            error = HandoffFailed(f"decode worker {handoff.lease.peer.worker_id} {why}")
            self._finish(handoff, released=False, error=error.info(), tell=False)

    def _finish(
        self, handoff: Outgoing, *, released: bool, error: ErrorInfo | None, tell: bool
    ) -> None:
        if not self._ends(handoff, released=released, error=error):
            return
        if tell:
            self._tasks.start(self._leave(handoff))
        if handoff.moving == 0:
            self._become_quiet(handoff)
        else:
            self._tasks.start(self._fence(handoff))

    def _retire(self, handoff: Outgoing) -> None:
        lease = handoff.lease
        del self._live[lease.key]
        handoff.pieces.clear()  # each of them names the hand-off: a circle that would outlive it
        self._past.put(lease.key, Finished(lease.peer.epoch, lease.error, handoff.quiet))
        if handoff.has_channel:
            self._channels.release(lease.peer.epoch)

    async def _fence(self, handoff: Outgoing) -> None:
        """Wait until no rank reads the source blocks."""
        peer, generation = handoff.lease.peer, handoff.lease.generation
        if not await self._me.fence(peer.epoch, generation):
            await handoff.still.wait()
        self._become_quiet(handoff)

    def _become_quiet(self, handoff: Outgoing) -> None:
        if not handoff.adrift:  # else decode never hears so: it waits for the end of this process
            handoff.quiet.set()
        self._listener.ended(handoff.lease.key, handoff.lease.error)

    async def _leave(self, handoff: Outgoing) -> None:
        if handoff.backend in ONE_SIDED:  # to decode it means that its blocks are not written
            await handoff.quiet.wait()
        lease = handoff.lease
        await self._tell(lease.peer, lease.end_message(self._me.ref.epoch))
