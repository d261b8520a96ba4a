"""Prefill's end of every hand-off, on rank 0's event loop."""

from __future__ import annotations

import itertools
from typing import Any

from concurrency.bounded_map import BoundedMap
from kv_transfer.control.context import EndpointContext, as_failure, totals
from kv_transfer.control.endpoint import ChannelMap, Endpoint
from kv_transfer.control.listeners import SenderListener, TransferReport
from kv_transfer.control.outgoing import FinishedOutgoing, Outgoing, OutgoingPiece
from kv_transfer.control.sender_channel import SenderChannel
from kv_transfer.plan.coverage import Area
from kv_transfer.plan.handoff_state import OVER, Verdict, lost_indices
from kv_transfer.plan.reshard import kv_bytes, layer_groups
from protocol.errors import BatonError, ErrorInfo, HandoffFailed, StaleMessage
from protocol.ids import RequestKey, WorkerRef
from protocol.kv_layout import Cells
from protocol.messages import Ack, CommitNotice, Grant, HandoffEnd, Ticket
from protocol.states import TransferState
from rpc import methods
from rpc.methods import Handler, Method


class Sender(Endpoint[Outgoing, FinishedOutgoing]):
    """Sends finished KV blocks to decode workers: of prompts, and of sequences that run here."""

    sends = True

    def __init__(self, context: EndpointContext, listener: SenderListener) -> None:
        super().__init__(context, Outgoing)
        self._listener = listener
        self._early: BoundedMap[RequestKey, Grant] = BoundedMap(self._config.finished_handoffs)
        numbers = itertools.count(1)
        self._channels = ChannelMap(
            self._config.max_peers,
            self._tasks,
            lambda decode: SenderChannel(decode, context, self._tasks, self.stats, numbers),
        )

    def handlers(self) -> dict[Method[Any, Any], Handler]:
        """What decode workers may call."""
        return {methods.GRANT: self.on_grant, methods.END: self.on_end}

    # --- from the worker ------------------------------------------------------------------------

    async def warm_up(self, decode: WorkerRef) -> None:
        """Build the links to a decode worker, once, before hand-offs need them. Never raises."""
        if self._channels.find(decode.epoch) is None and not self._channels.is_full:
            await self._channels.get(decode).warm_up()

    def expect(
        self, key: RequestKey, ticket: Ticket, decode: WorkerRef, *, live: bool = False
    ) -> None:
        """A request was submitted whose KV will go to `decode`; its grant may already be here, or
        come as long as the ticket is good. `live`: it runs here, and the listener learns when all
        pushed blocks are `sent`. Raises StaleMessage for a bad ticket or an older attempt, and the
        error of a hand-off that decode has ended before it began. Idempotent."""
        if not self._begin(key, ticket, decode):
            return
        self._live[key].live = live
        if early := self._early.pop(key):
            self._tasks.start(self._take_early(early))  # decode was quicker than the router

    def push(
        self,
        key: RequestKey,
        block_ids: tuple[int, ...],
        first_block: int,
        *,
        group: int = 0,
        after: int = 0,
    ) -> None:
        """Send `block_ids`, finished blocks first_block, first_block + 1, ... of the sequence here,
        of one KV group.
        Returns at once; the data leaves in the order of the pushes. With `after`, the blocks are
        finished by that step of the engine, which still runs: each layer leaves behind it.

        The blocks must stay as they are until `delivered` or `ended`. What decode has cached or
        does not see is skipped. A push for a hand-off that is over is ignored; one that was never
        granted, or that repeats blocks, raises StaleMessage.
        """
        handoff = self._live.get(key)
        if handoff is None:
            return
        layout = self._context.layout
        counts = [layout.groups[group].num_layers or layout.num_layers]
        # A one-sided backend groups layers by itself.
        if after and not handoff.route.one_sided and len(layout.groups) == 1:
            num_tokens = len(block_ids) * layout.block_size
            heads = layout.num_kv_heads
            size = kv_bytes(layout, num_tokens=num_tokens, num_layers=1, num_heads=heads)
            counts = layer_groups(layout.num_layers, size)
        per_block = layout.block_size // max(1, handoff.cell_size)
        first_layer = 0
        for count in counts:
            area = Area(
                group=group,
                first_cell=first_block * per_block,
                num_cells=len(block_ids) * per_block,
                first_layer=first_layer,
                num_layers=count,
            )
            self._push(handoff, area, block_ids, after)
            first_layer += count
        if handoff.live and handoff.is_pushed and not handoff.undelivered:
            self._listener.sent(key)  # the receiver, whose blocks are smaller, has it all

    def _push(self, handoff: Outgoing, area: Area, block_ids: tuple[int, ...], after: int) -> None:
        waiting = handoff.state is TransferState.RESERVED
        for index, part in handoff.push(area, max_cells=handoff.route.max_cells):
            cells = Cells.within(
                block_ids,
                self._context.layout.block_size,
                size=handoff.cell_size,
                first=part.first_cell - area.first_cell,
                count=part.num_cells,
            )
            piece = OutgoingPiece(
                handoff=handoff,
                source=self._context.ref,
                layout=self._context.layout,
                index=index,
                area=part,
                cells=cells,
                after=after,
            )
            handoff.pieces[index] = piece
            self._send(piece)
        if waiting and handoff.state is TransferState.MOVING:
            self._start_lease(handoff)

    def announce_commit(self, key: RequestKey, in_s: float) -> None:
        """The commit of a hand-off will follow in about `in_s` seconds: tell decode, once. Ignored
        for a hand-off that is over."""
        handoff = self._live.get(key)
        if handoff is not None:
            notice = CommitNotice(key=key, epoch=self._context.ref.epoch, in_s=in_s)
            self._tasks.start(
                self._context.call(handoff.peer, methods.COMMIT_NOTICE, notice, attempts=1)
            )

    def commit(self, key: RequestKey, tokens: tuple[int, ...], *, held: int | None = None) -> None:
        """Everything was pushed, and the `tokens` that follow are known: commit once all pieces are
        delivered. `held`: as in protocol.messages.Commit. Returns at once. Ignored for a hand-off
        that is over; raises ValueError when blocks are missing."""
        handoff = self._live.get(key)
        if handoff is not None:
            handoff.committing(tokens, held=held)
            if not handoff.undelivered:
                self._tasks.start(self._commit(handoff))

    async def end(self, key: RequestKey, released: bool, error: ErrorInfo | None = None) -> None:
        """Leave a hand-off: not needed any more (`released`), or failed here. `ended` is called as
        soon as no rank reads a source block, and decode is told. Ignored when it is over."""
        handoff = self._live.get(key)
        if handoff is not None:
            self._finish(handoff, released=released, error=error, tell=True)
            await handoff.quiet.wait()

    async def peer_lost(self, epoch: int) -> None:
        """The decode worker of this epoch is gone: end its hand-offs, close its channel."""
        self._end_all(epoch, "is lost")
        await self._channels.close(epoch)

    # --- from decode ----------------------------------------------------------------------------

    def on_grant(self, grant: Grant) -> Ack:
        """Decode holds blocks for a request. Sent again, it asks whether the hand-off is in
        progress here. Raises StaleMessage for another epoch, ticket or generation, the error of a
        hand-off that failed here, and HandoffFailed naming the field in which KV layouts differ."""
        if self.take(grant):
            self._listener.granted(grant.key, grant)
        return Ack()

    def take(self, grant: Grant) -> bool:
        """As `on_grant`, for a caller that the listener need not tell of it; whether it is new."""
        handoff = self._live.get(grant.key)
        genuine = None if handoff is None else handoff.ticket
        self._context.check_ticket(
            grant.ticket, grant.key, grant.decode.epoch, sends=True, genuine=genuine
        )
        finished = self._finished.get(grant.key)
        if finished is not None and finished.peer_epoch == grant.decode.epoch:
            raise finished.reason(grant.key)
        if handoff is None:
            self._early.put(grant.key, grant)
            return False
        if handoff.grant(grant, self._context.layout.block_size) is Verdict.REPEAT:
            return False
        try:
            channel = self._channels.get(grant.decode)
            handoff.route = channel.route(grant)
            channel.num_users += 1
        except HandoffFailed as error:
            self._finish(handoff, released=False, error=error.info(), tell=False)
            raise
        return True

    async def on_end(self, end: HandoffEnd) -> Ack:
        """Decode leaves a hand-off. The reply means that no rank writes for it any more."""
        handoff = self._live.get(end.key)
        if handoff is not None:
            if end.epoch != handoff.peer.epoch:
                raise StaleMessage(f"end of {end.key} is from another epoch", param="epoch")
            handoff.claimed = False  # decode never ends what it has committed
            self._finish(handoff, released=end.released, error=end.error, tell=False)
            await handoff.quiet.wait()
            return Ack()
        finished = self._finished.get(end.key)
        if finished is None:
            self._early.pop(end.key)
            self._finished.put(end.key, FinishedOutgoing(end.epoch, end.error, None))
        elif finished.quiet is not None:
            await finished.quiet.wait()
        return Ack()

    # --- one hand-off ---------------------------------------------------------------------------

    async def _take_early(self, grant: Grant) -> None:
        """A grant that was acknowledged before its request came. A refusal needs an End message."""
        try:
            self.on_grant(grant)
        except BatonError as error:
            handoff = self._live.get(grant.key)
            if handoff is not None:
                self._finish(handoff, released=False, error=error.info(), tell=True)
            else:
                epoch, info = self._context.ref.epoch, error.info()
                end = HandoffEnd(
                    key=grant.key, epoch=epoch, to_sender=False, released=False, error=info
                )
                await self._send_end(grant.decode, end)

    def _send(self, piece: OutgoingPiece) -> None:
        piece.handoff.undelivered.add(piece.index)
        self._tasks.start(self._deliver(piece))

    async def _deliver(self, piece: OutgoingPiece) -> None:
        """Send a piece; then commit if that waits for no other piece."""
        handoff = piece.handoff
        if handoff.state in OVER:
            return
        channel = self._channels.get(handoff.peer)
        if handoff.started is None:
            handoff.started = self._clock.wall()
        try:
            results = await channel.deliver(piece)
        except BatonError as error:
            if error.param == "backend":  # the next hand-off to this worker tries another
                channel.refuse(handoff.route.backend)
            failure = as_failure(error, "decode worker").info()
            self._finish(handoff, released=False, error=failure, tell=True)
            return
        num_bytes, checksum = totals(results)
        handoff.sent(piece.index, num_bytes=num_bytes, checksum=checksum)
        self.stats.num_bytes += num_bytes
        self.stats.num_pieces += 1
        handoff.undelivered.remove(piece.index)
        if handoff.undelivered:
            return
        if handoff.tokens is not None:
            await self._commit(handoff)
        elif handoff.live and handoff.is_pushed and handoff.state not in OVER:
            self._listener.sent(handoff.key)

    async def _commit(self, handoff: Outgoing) -> None:
        """Every piece is delivered. Pieces that decode lost are sent again before another try."""
        if handoff.state in OVER:
            return
        request = handoff.commit_request(handoff.written, handoff.num_commits)
        handoff.claimed = True
        answer = await self._context.call(handoff.peer, methods.COMMIT, request)
        handoff.claimed = answer.error is None or answer.uncertain
        if handoff.is_in(*OVER):  # ended meanwhile; decode keeps the sequence if it had committed
            return
        handoff.num_commits += 1
        lost = lost_indices(answer.error)
        again = [handoff.pieces[index] for index in lost if index in handoff.pieces]
        if again and handoff.num_commits < self._config.piece_attempts:
            for piece in again:
                self._send(piece)
            return
        if answer.error is not None:
            error = as_failure(answer.error, "decode worker").info()
            self._finish(handoff, released=False, error=error, tell=answer.uncertain or bool(lost))
            return
        handoff.move_to(TransferState.COMMITTED)
        self.stats.committed += 1
        self._retire(handoff)
        handoff.quiet.set()
        end = self._clock.wall()
        report = TransferReport(
            num_bytes=handoff.num_bytes,
            num_pieces=handoff.num_pieces,
            start=handoff.started or end,
            end=end,
        )
        self._listener.delivered(handoff.key, report)

    def _finish(
        self, handoff: Outgoing, *, released: bool, error: ErrorInfo | None, tell: bool
    ) -> None:
        if not self._move_to_end(handoff, released=released, error=error):
            return
        if tell:
            self._tasks.start(self._leave(handoff))
        if handoff.num_moving == 0:
            self._become_quiet(handoff)
        else:
            self._tasks.start(self._fence(handoff))

    def _retire(self, handoff: Outgoing) -> None:
        del self._live[handoff.key]
        handoff.pieces.clear()  # each refers to the hand-off: a cycle that would outlive it
        finished = FinishedOutgoing(handoff.peer.epoch, handoff.error, handoff.quiet)
        self._finished.put(handoff.key, finished)
        channel = self._channels.find(handoff.peer.epoch)
        if handoff.route.backend and channel is not None:  # it was granted
            channel.num_users -= 1

    async def _fence(self, handoff: Outgoing) -> None:
        """Wait until no rank reads the source blocks."""
        if not await self._context.fence(handoff.peer.epoch, handoff.generation):
            await handoff.idle.wait()
        self._become_quiet(handoff)

    def _become_quiet(self, handoff: Outgoing) -> None:
        if not handoff.unreachable_rank:  # else decode has to wait for the end of this process
            handoff.quiet.set()
        self._listener.ended(handoff.key, handoff.error, uncertain=handoff.claimed)

    async def _leave(self, handoff: Outgoing) -> None:
        if handoff.route.one_sided:  # the message means that decode's blocks are not written
            await handoff.quiet.wait()
        end = handoff.end_message(self._context.ref.epoch, to_sender=False)
        await self._send_end(handoff.peer, end)
