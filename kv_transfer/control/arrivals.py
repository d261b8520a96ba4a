"""Pieces on their way into a decode worker: what its ranks receive, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from concurrency.tasks import Tasks
from kv_transfer.config import ChecksumKind
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.incoming import Incoming
from kv_transfer.control.link_warmup import accept_orders
from kv_transfer.control.rank_channel import first_error, run_orders, totals
from kv_transfer.control.receiver_channel import ReceiverChannel, ReceiverChannels
from kv_transfer.control.stats import TransferStats
from kv_transfer.data.rank_commands import MoveCommand, RankCommand, received_parts
from kv_transfer.plan.checksum import combine, place_checksum
from kv_transfer.plan.handoff_state import Verdict
from kv_transfer.plan.reshard import check_layout, kv_bytes, reshard
from protocol.ids import WorkerRef
from protocol.kv_layout import Cells, KVLayout
from protocol.messages import Meeting, Piece


class Arrivals:
    """Has the ranks receive pieces, and tells their hand-offs. `lost` is called when one has failed
    and nothing newer replaces it."""

    def __init__(
        self,
        party: EndpointContext,
        tasks: Tasks,
        stats: TransferStats,
        *,
        lost: Callable[[Incoming], None],
    ) -> None:
        self._me = party
        self._tasks = tasks
        self._stats = stats
        self._lost = lost
        self._peers = ReceiverChannels(party, tasks)

    def prepare(self, meeting: Meeting) -> None:
        """Accept a sender's links before anything moves. Raises as `Peer.use`."""
        self._peers.get(meeting.prefill.epoch).use(meeting.link)
        self._tasks.start(run_orders(self._me.ranks, accept_orders(self._me, meeting)))

    def announced(self, handoff: Incoming, piece: Piece) -> None:
        """A sender is about to send a piece: post receives for it on every rank. Raises, before
        anything is posted, as `Peer.use`, `Peer.take`, `check_layout` and `Inbound.announce`."""
        check_layout(self._me.layout, piece.prefill_layout)
        peer = self._peers.get(piece.prefill.epoch)
        peer.use(piece.link)
        if not handoff.lease.knows(piece):
            peer.take(piece.turn)
        if handoff.lease.announce(piece) is Verdict.NEW:
            handoff.backend = piece.backend
            self._post(handoff, piece, peer)

    def written(self, handoff: Incoming, pieces: Iterable[Piece]) -> None:
        """Pieces that the sender has written by itself; they are read back only to be summed."""
        for piece in pieces:
            check_layout(self._me.layout, piece.prefill_layout)
            if handoff.lease.announce(piece) is Verdict.REPEAT:
                continue
            handoff.backend = piece.backend
            if self._me.config.checksum_kind(piece.backend) is ChecksumKind.NONE:
                self._arrived(handoff, piece, *self._as_written(handoff, piece))
            else:
                self._post(handoff, piece, self._peers.get(piece.prefill.epoch))

    async def forget(self, epoch: int) -> None:
        """Close a sender's connections; what is moving on them fails."""
        await self._peers.forget(epoch)

    def _as_written(self, handoff: Incoming, piece: Piece) -> tuple[int, int]:
        """Bytes and checksum of a piece whose content is not summed."""
        slices = reshard(piece.prefill_layout.rank_heads, self._me.layout.rank_heads)
        num_bytes = kv_bytes(
            piece.prefill_layout,
            num_tokens=piece.num_cells * handoff.lease.cell_size,
            num_layers=piece.num_layers,
            num_heads=sum(part.num_heads for part in slices),
        )
        places = [
            place_checksum(
                generation=piece.generation,
                sequence=piece.sequence,
                source=part.source_rank,
                dest=part.dest_rank,
            )
            for part in slices
        ]
        return num_bytes, combine(places)

    def _post(self, handoff: Incoming, piece: Piece, peer: ReceiverChannel) -> None:
        cells = handoff.lease.cells(piece)
        orders = receive_orders(piece, cells, me=self._me.ref, layout=self._me.layout)
        handoff.moving += 1
        peer.moving += 1
        self._tasks.start(self._receive(handoff, piece, peer, orders))

    async def _receive(
        self, handoff: Incoming, piece: Piece, peer: ReceiverChannel, orders: dict[int, RankCommand]
    ) -> None:
        outcomes = await run_orders(self._me.ranks, orders)
        handoff.moving -= 1
        peer.moving -= 1
        error = first_error(outcomes)
        if error is None:
            self._arrived(handoff, piece, *totals(outcomes))
        else:
            if piece.link > peer.broken:
                peer.broken = piece.link
                self._stats.relinked += 1
            if handoff.lease.lost(piece.sequence, piece.link):
                self._lost(handoff)
        handoff.changed.set()

    def _arrived(self, handoff: Incoming, piece: Piece, num_bytes: int, checksum: int) -> None:
        handoff.lease.arrived(piece.sequence, piece.link, checksum=checksum)
        self._stats.num_bytes += num_bytes
        self._stats.num_pieces += 1


def receive_orders(
    piece: Piece, cells: Cells, *, me: WorkerRef, layout: KVLayout
) -> dict[int, RankCommand]:
    """What each destination rank has to receive of a piece, into `cells` of decode's blocks."""
    return {
        rank: RankCommand(
            receive=MoveCommand(
                rank=rank,
                sender_epoch=piece.prefill.epoch,
                receiver_epoch=me.epoch,
                link=piece.link,
                generation=piece.generation,
                sequence=piece.sequence,
                cells=cells,
                first_layer=piece.first_layer,
                num_layers=piece.num_layers,
                parts=own,
                backend=piece.backend,
            )
        )
        for rank, own in received_parts(piece.prefill_layout.rank_heads, layout.rank_heads).items()
    }
