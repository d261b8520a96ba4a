"""A sender's record of one hand-off, and its pieces."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kv_transfer.control.endpoint import FinishedHandoff
from kv_transfer.data.rank_commands import (
    MoveCommand,
    Parts,
    RankCommand,
    RankResult,
    ReadyCommand,
)
from kv_transfer.plan.coverage import Area, cells_in
from kv_transfer.plan.handoff_state import OVER, OutboundHandoff
from protocol.ids import WorkerRef
from protocol.kv_layout import Cells, KVLayout
from protocol.messages import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How pieces travel, once decode's grant decides it: the backend, what each rank sends of a
    piece, the type of values on their way, the size of a piece. `one_sided`: the ranks write into
    decode's pool."""

    backend: str = ""
    parts: Parts = field(default_factory=dict)
    dtype: str = ""
    max_cells: int = 1
    one_sided: bool = False


_UNDECIDED = Route()


@dataclass(slots=True, kw_only=True, eq=False)
class Outgoing(OutboundHandoff):
    """One hand-off in progress. `num_moving` counts pieces that the ranks are sending,
    `num_commits` the commits sent; `undelivered` are the pieces on their way. `unreachable_rank`: a
    rank that may be frozen, and write into decode's blocks when it thaws. `live`: the sequence runs
    on here until its blocks are sent. `claimed`: a commit was sent and not refused, so that decode
    may own the sequence."""

    route: Route = _UNDECIDED
    num_moving: int = 0
    num_commits: int = 0
    unreachable_rank: bool = False
    live: bool = False
    claimed: bool = False
    started: float | None = None
    undelivered: set[int] = field(default_factory=set)
    pieces: dict[int, OutgoingPiece] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set when num_moving falls to 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)  # over, no rank reads or writes

    @property
    def written(self) -> tuple[Piece, ...]:
        """The pieces that the commit has to name, because no announcement did."""
        if not self.route.one_sided:
            return ()
        return tuple(piece.announcement(0, 0) for piece in self.pieces.values())


@dataclass(slots=True)
class FinishedOutgoing(FinishedHandoff):
    """Kept of a hand-off that is over. `quiet` is None when it never began."""

    quiet: asyncio.Event | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutgoingPiece:
    """One piece, to be delivered on the channel's incarnation of that time. `cells` lie in the
    source's blocks and are complete after step `after` of its engine."""

    handoff: Outgoing
    source: WorkerRef
    layout: KVLayout
    index: int
    area: Area
    cells: Cells
    after: int

    @property
    def ready(self) -> ReadyCommand | None:
        """What rank 0 has to wait for before the piece is announced, because both workers are busy
        with it from then on; None when nothing."""
        if self.after == 0 or self.handoff.route.one_sided:
            return None
        return ReadyCommand(
            after=self.after, layer=self.area.first_layer + self.area.num_layers - 1
        )

    @property
    def wanted(self) -> bool:
        return self.handoff.state not in OVER

    def announcement(self, incarnation: int, turn: int) -> Piece:
        handoff, area = self.handoff, self.area
        return Piece(
            key=handoff.key,
            ticket=handoff.ticket,
            generation=handoff.generation,
            index=self.index,
            first_cell=handoff.cell_number(area),
            num_cells=area.num_cells,
            first_layer=area.first_layer,
            num_layers=area.num_layers,
            prefill=self.source,
            prefill_layout=self.layout,
            incarnation=incarnation,
            turn=turn,
            backend=handoff.route.backend,
        )

    def start_moving(self, incarnation: int, *, discard: bool) -> dict[int, RankCommand]:
        """The commands that send it. It counts as moving until `stop_moving`."""
        self.handoff.num_moving += 1
        self.handoff.idle.clear()
        peer_cells = self._peer_cells()
        return {
            rank: RankCommand(
                send=MoveCommand(
                    rank=rank,
                    sender_epoch=self.source.epoch,
                    receiver_epoch=self.handoff.peer.epoch,
                    incarnation=incarnation,
                    generation=self.handoff.generation,
                    index=self.index,
                    cells=self.cells,
                    first_layer=self.area.first_layer,
                    num_layers=self.area.num_layers,
                    parts=parts,
                    discard=discard,
                    backend=self.handoff.route.backend,
                    dtype=self.handoff.route.dtype,
                    peer_cells=peer_cells,
                    after=self.after,
                )
            )
            for rank, parts in self.handoff.route.parts.items()
        }

    def stop_moving(self, results: list[RankResult]) -> None:
        """The commands of `start_moving` have ended, on every rank that can be reached."""
        handoff = self.handoff
        if handoff.route.one_sided and not all(result.answered for result in results):
            handoff.unreachable_rank = True
        handoff.num_moving -= 1
        if handoff.num_moving == 0:
            handoff.idle.set()

    def _peer_cells(self) -> Cells | None:
        """Where the ranks write the cells by themselves, in decode's blocks."""
        handoff, grant = self.handoff, self.handoff.grant_message
        if grant is None or not handoff.route.one_sided:
            return None
        return cells_in(
            grant.block_tables,
            grant.layout,
            grant.num_tokens,
            size=handoff.cell_size,
            first=handoff.cell_number(self.area),
            count=self.area.num_cells,
        )
