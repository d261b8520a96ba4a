"""A receiver's ends of its channels (plan.channel): posts receives for announced pieces on every
rank, and reports what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from concurrency.bounded_map import BoundedMap
from concurrency.event_loop import Tasks
from kv_transfer.config import ChecksumKind
from kv_transfer.control.context import EndpointContext, first_error, totals
from kv_transfer.control.endpoint import ChannelMap, TransferStats
from kv_transfer.control.incoming import Incoming
from kv_transfer.data.rank_commands import (
    CloseCommand,
    MoveCommand,
    RankCommand,
    open_commands,
    received_parts,
)
from kv_transfer.plan.channel import ReceiveOrder
from kv_transfer.plan.checksum import combine, place_checksum
from kv_transfer.plan.handoff_state import Verdict
from kv_transfer.plan.reshard import check_layout, kv_bytes, reshard, travelling_dtype
from protocol.ids import WorkerRef
from protocol.messages import OpenLinks, Piece


class ReceiverChannel:
    """The channel from one prefill worker: the order of its pieces, and how many are moving.
    `closed` keeps the last incarnation of each epoch whose channel was closed here, because the
    worker may still send on it."""

    def __init__(
        self, prefill: WorkerRef, context: EndpointContext, closed: BoundedMap[int, int]
    ) -> None:
        self.order = ReceiveOrder(closed.pop(prefill.epoch) or 0)
        self.num_moving = 0
        self._epoch = prefill.epoch
        self._context = context
        self._closed = closed

    @property
    def is_idle(self) -> bool:
        return self.num_moving == 0

    async def close(self) -> None:
        self._closed.put(self._epoch, self.order.incarnation)
        close = CloseCommand(
            sender_epoch=self._epoch,
            receiver_epoch=self._context.ref.epoch,
            incarnation=self.order.incarnation,
            forget=True,
        )
        await self._context.run_everywhere(RankCommand(close=close))


class ReceiverChannels:
    """All channels of a receiver. `on_lost` is called when a piece has failed and no newer posting
    replaces it."""

    def __init__(
        self,
        context: EndpointContext,
        tasks: Tasks,
        stats: TransferStats,
        *,
        on_lost: Callable[[Incoming], None],
    ) -> None:
        self._context = context
        self._tasks = tasks
        self._stats = stats
        self._on_lost = on_lost
        closed: BoundedMap[int, int] = BoundedMap(context.config.finished_handoffs)
        self._channels = ChannelMap(
            context.config.max_peers, tasks, lambda peer: ReceiverChannel(peer, context, closed)
        )

    def accept(self, request: OpenLinks) -> None:
        """Make the ranks accept a sender's links before any piece moves. Raises as
        `ReceiveOrder.use`."""
        self._channels.get(request.prefill).order.use(request.incarnation)
        commands = open_commands(
            received_parts(request.prefill_layout.rank_heads, self._context.layout.rank_heads),
            sender_epoch=request.prefill.epoch,
            receiver_epoch=self._context.ref.epoch,
            incarnation=request.incarnation,
            backend=request.backend,
            sending=False,
        )
        self._tasks.start(self._context.run(commands))

    def announced(self, handoff: Incoming, piece: Piece) -> None:
        """A sender is about to send a piece: post receives for it on every rank. Raises, before
        anything is posted, as `ReceiveOrder.use` and `take`, `check_layout` and
        `InboundHandoff.announce`."""
        check_layout(self._context.layout, piece.prefill_layout)
        channel = self._channels.get(piece.prefill)
        channel.order.use(piece.incarnation)
        if not handoff.knows(piece):
            channel.order.take(piece.turn)
        if handoff.announce(piece) is Verdict.NEW:
            handoff.backend = piece.backend
            self._post(handoff, piece, channel)

    def written(self, handoff: Incoming, pieces: Iterable[Piece]) -> None:
        """Pieces that the sender has written itself; they are read back only to be summed."""
        for piece in pieces:
            check_layout(self._context.layout, piece.prefill_layout)
            if handoff.announce(piece) is Verdict.REPEAT:
                continue
            handoff.backend = piece.backend
            if self._context.config.checksum_kind(piece.backend) is ChecksumKind.NONE:
                self._arrived(handoff, piece, *self._unsummed_totals(handoff, piece))
            else:
                self._post(handoff, piece, self._channels.get(piece.prefill))

    async def close(self, epoch: int) -> None:
        """Close a channel; messages in flight on it fail."""
        await self._channels.close(epoch)

    def _unsummed_totals(self, handoff: Incoming, piece: Piece) -> tuple[int, int]:
        """Bytes and checksum of a piece whose content is not summed."""
        slices = reshard(piece.prefill_layout.rank_heads, self._context.layout.rank_heads)
        num_bytes = kv_bytes(
            piece.prefill_layout,
            num_tokens=piece.num_cells * handoff.cell_size,
            num_layers=piece.num_layers,
            num_heads=sum(part.num_heads for part in slices),
            dtype=travelling_dtype(self._context.layout, piece.prefill_layout),
        )
        places = [
            place_checksum(
                generation=piece.generation,
                index=piece.index,
                source=part.source_rank,
                dest=part.dest_rank,
            )
            for part in slices
        ]
        return num_bytes, combine(places)

    def _post(self, handoff: Incoming, piece: Piece, channel: ReceiverChannel) -> None:
        commands = self._receive_commands(handoff, piece)
        handoff.num_moving += 1
        channel.num_moving += 1
        self._tasks.start(self._receive(handoff, piece, channel, commands))

    async def _receive(
        self,
        handoff: Incoming,
        piece: Piece,
        channel: ReceiverChannel,
        commands: dict[int, RankCommand],
    ) -> None:
        results = await self._context.run(commands)
        handoff.num_moving -= 1
        channel.num_moving -= 1
        if first_error(results) is None:
            self._arrived(handoff, piece, *totals(results))
        else:
            if channel.order.fail(piece.incarnation):
                self._stats.relinked += 1
            if handoff.lost(piece.index, piece.incarnation):
                self._on_lost(handoff)
        handoff.changed.set()

    def _arrived(self, handoff: Incoming, piece: Piece, num_bytes: int, checksum: int) -> None:
        handoff.arrived(piece.index, piece.incarnation, checksum=checksum)
        self._stats.num_bytes += num_bytes
        self._stats.num_pieces += 1

    def _receive_commands(self, handoff: Incoming, piece: Piece) -> dict[int, RankCommand]:
        cells = handoff.cells(piece)
        parts = received_parts(piece.prefill_layout.rank_heads, self._context.layout.rank_heads)
        dtype = travelling_dtype(self._context.layout, piece.prefill_layout)
        return {
            rank: RankCommand(
                receive=MoveCommand(
                    rank=rank,
                    sender_epoch=piece.prefill.epoch,
                    receiver_epoch=self._context.ref.epoch,
                    incarnation=piece.incarnation,
                    generation=piece.generation,
                    index=piece.index,
                    cells=cells,
                    first_layer=piece.first_layer,
                    num_layers=piece.num_layers,
                    parts=own,
                    backend=piece.backend,
                    dtype=dtype,
                )
            )
            for rank, own in parts.items()
        }
