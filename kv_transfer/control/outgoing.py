"""A sender's record of one hand-off, and its pieces as a sender channel takes them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kv_transfer.config import ONE_SIDED
from kv_transfer.control.finished_handoffs import FinishedHandoff
from kv_transfer.data.rank_commands import (
    MoveCommand,
    Part,
    Parts,
    RankCommand,
    RankResult,
    ReadyCommand,
)
from kv_transfer.plan.coverage import Area
from kv_transfer.plan.handoff_state import OVER, OutboundHandoff
from protocol.ids import WorkerRef
from protocol.kv_layout import Cells, KVLayout
from protocol.messages import Piece


@dataclass(slots=True, eq=False)
class Outgoing:
    """One hand-off in progress. `moving` counts pieces that the ranks are sending, `commits` how
    often decode was asked to commit; `out` are the pieces that are not delivered yet. `adrift`: a
    rank that is lost may be frozen, and write into decode's blocks when it thaws."""

    lease: OutboundHandoff
    has_channel: bool = False
    backend: str = ""
    parts: Parts = field(default_factory=dict)
    max_cells: int = 1
    moving: int = 0
    commits: int = 0
    adrift: bool = False
    started: float | None = None
    out: set[int] = field(default_factory=set)
    pieces: dict[int, PieceOut] = field(default_factory=dict)
    still: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever moving falls to 0
    quiet: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # over, source blocks not read any more

    @property
    def written(self) -> tuple[Piece, ...]:
        """The pieces that the commit has to name, because nothing announced them."""
        if self.backend not in ONE_SIDED:
            return ()
        return tuple(piece.announcement(0, 0) for piece in self.pieces.values())


@dataclass(slots=True)
class Finished(FinishedHandoff):
    """What a sender remembers of a hand-off that is over. `quiet` is None when it never began."""

    quiet: asyncio.Event | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceOut:
    """One piece of one hand-off, to be delivered on whatever link is good by then. `cells` lie in
    the source's blocks and are complete after step `after` of its engine."""

    handoff: Outgoing
    me: WorkerRef
    layout: KVLayout
    sequence: int
    area: Area
    cells: Cells
    after: int

    @property
    def ready(self) -> ReadyCommand | None:
        """What has to happen before it can be announced: both sides are busy with it from then on.
        None when nothing has."""
        if self.after == 0 or self.one_sided:
            return None
        area = self.area
        return ReadyCommand(after=self.after, layer=area.first_layer + area.num_layers - 1)

    @property
    def alive(self) -> bool:
        """Whether the hand-off still wants it."""
        return self.handoff.lease.state not in OVER

    @property
    def one_sided(self) -> bool:
        """Whether the ranks write it into decode's pool."""
        return self.handoff.backend in ONE_SIDED

    def announcement(self, link: int, turn: int) -> Piece:
        """The message that announces it."""
        lease, area = self.handoff.lease, self.area
        return Piece(
            key=lease.key,
            ticket=lease.ticket,
            generation=lease.generation,
            sequence=self.sequence,
            first_cell=area.first_cell,
            num_cells=area.num_cells,
            first_layer=area.first_layer,
            num_layers=area.num_layers,
            prefill=self.me,
            prefill_layout=self.layout,
            link=link,
            turn=turn,
            backend=self.handoff.backend,
        )

    def orders(self, link: int, *, discard: bool) -> dict[int, RankCommand]:
        """What each source rank has to send. Counts as moving from here on."""
        self.handoff.moving += 1
        self.handoff.still.clear()
        return {
            rank: RankCommand(send=self._order(rank, link, own, discard=discard))
            for rank, own in self.handoff.parts.items()
        }

    def moved(self, outcomes: list[RankResult]) -> None:
        """The ranks have ended what `orders` named, as far as they can be asked."""
        if self.one_sided and not all(outcome.answered for outcome in outcomes):
            self.handoff.adrift = True
        self.handoff.moving -= 1
        if self.handoff.moving == 0:
            self.handoff.still.set()

    def _order(
        self, rank: int, link: int, parts: tuple[Part, ...], *, discard: bool
    ) -> MoveCommand:
        lease, area = self.handoff.lease, self.area
        peer_cells = None
        if self.one_sided:
            grant = lease.grant_message
            assert grant is not None
            peer_cells = Cells.within(
                grant.block_ids,
                grant.layout.block_size,
                size=lease.cell_size,
                first=area.first_cell,
                count=area.num_cells,
            )
        return MoveCommand(
            rank=rank,
            sender_epoch=self.me.epoch,
            receiver_epoch=lease.peer.epoch,
            link=link,
            generation=lease.generation,
            sequence=self.sequence,
            cells=self.cells,
            first_layer=area.first_layer,
            num_layers=area.num_layers,
            parts=parts,
            discard=discard,
            backend=self.handoff.backend,
            peer_cells=peer_cells,
            after=self.after,
        )
