"""The life of one hand-off, on decode and on prefill. Pure: messages and times in, verdicts out.

    OFFERED -> RESERVED -> MOVING -> COMMITTED     (protocol.states has the table)
    any of them -> RELEASED | ABORTED

Every message is idempotent: seen again it changes nothing and the verdict is REPEAT; one of
another attempt, epoch, ticket or generation raises StaleMessage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from kv_transfer.config import ONE_SIDED
from kv_transfer.plan.checksum import combine
from kv_transfer.plan.coverage import (
    Area,
    Coverage,
    Tables,
    cells_in,
    check_grant,
    check_sizes,
    num_writable,
    writable_blocks,
)
from kv_transfer.plan.reshard import cell_size
from kv_transfer.plan.states import PIECE_TRANSITIONS, PieceState, advance
from protocol.errors import BatonError, ErrorInfo, HandoffFailed, StaleMessage
from protocol.ids import RequestKey, WorkerRef
from protocol.kv_layout import Cells, KVLayout
from protocol.messages import Commit, Grant, HandoffEnd, Piece, Ticket
from protocol.states import TransferState, check_transfer

ENDED = frozenset({TransferState.RELEASED, TransferState.ABORTED})
OVER = ENDED | {TransferState.COMMITTED}


class Verdict(StrEnum):
    """What a message means to a hand-off."""

    NEW = "new"  # act on it
    REPEAT = "repeat"  # already done: acknowledge again


@dataclass(slots=True)
class _Posted:
    """One announced piece; `checksum` once it has arrived."""

    piece: Piece
    state: PieceState = PieceState.POSTED
    checksum: int = 0

    def move_to(self, target: PieceState) -> None:
        self.state = advance(PIECE_TRANSITIONS, self.state, target)


class PiecesLost(HandoffFailed):
    """Pieces that the sender has sent did not arrive: it may send them again. Only code, message
    and param of an error cross the wire, so their indices travel in `param`."""

    def __init__(self, indices: list[int]) -> None:
        numbers = ",".join(map(str, indices))
        super().__init__(f"pieces {numbers} did not arrive", param=f"lost:{numbers}")


def lost_indices(error: BatonError | None) -> list[int]:
    """The indices in a PiecesLost that came over the wire; empty for any other error."""
    kind, _, numbers = ((error and error.param) or "").partition(":")
    return [int(number) for number in numbers.split(",")] if kind == "lost" else []


@dataclass(slots=True, kw_only=True, eq=False)
class HandoffState:
    """What both workers keep of a hand-off. `deadline`, in monotonic seconds, may be a lease's."""

    key: RequestKey
    ticket: Ticket
    peer: WorkerRef
    deadline: float
    leased: bool = False
    state: TransferState = TransferState.OFFERED
    error: ErrorInfo | None = None

    def is_in(self, *states: TransferState) -> bool:
        return self.state in states

    def move_to(self, target: TransferState) -> None:
        """Take a step that the table allows, or raise StaleMessage."""
        check_transfer(self.state, target)
        self.state = target

    def end(self, *, released: bool, error: ErrorInfo | None) -> Verdict:
        """Leave without a commit. REPEAT when it is over already."""
        if self.state in OVER:
            return Verdict.REPEAT
        self.move_to(TransferState.RELEASED if released else TransferState.ABORTED)
        self.error = error
        return Verdict.NEW

    def end_message(self, epoch: int, *, to_sender: bool) -> HandoffEnd:
        """The message that tells the peer of the end; `epoch` is this worker's."""
        return HandoffEnd(
            key=self.key,
            epoch=epoch,
            to_sender=to_sender,
            released=self.state is TransferState.RELEASED,
            error=self.error,
        )

    def check_same(self, ticket: Ticket) -> None:
        """Raise StaleMessage when a message of this attempt carries another ticket."""
        if ticket != self.ticket:
            raise StaleMessage(f"{self.key} has another ticket", param="ticket")


@dataclass(slots=True, kw_only=True, eq=False)
class InboundHandoff(HandoffState):
    """On decode: grants blocks, accepts pieces, checks at commit that all of them arrived."""

    generation: int = 0
    block_tables: Tables = ()
    num_cached: int = 0
    num_tokens: int = 0
    num_refused: int = 0  # commits, for lost pieces
    commit_message: Commit | None = None
    cell_size: int = 0  # once a piece has come
    _layout: KVLayout = field(init=False)
    _coverage: Coverage | None = None
    _pieces: dict[int, _Posted] = field(default_factory=dict)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks of all KV groups."""
        return tuple(chain.from_iterable(self.block_tables))

    @property
    def writable(self) -> tuple[int, ...]:
        return writable_blocks(self.block_tables, self.num_cached, self.num_tokens, self._layout)

    def reserve(
        self,
        *,
        generation: int,
        block_tables: Tables,
        num_cached: int,
        num_tokens: int,
        layout: KVLayout,
    ) -> None:
        """Blocks of `layout` are set aside under `generation`, for `num_tokens` tokens."""
        check_sizes(block_tables, num_cached, num_tokens, layout)
        if (num_blocks := sum(map(len, block_tables))) > self.ticket.num_blocks:
            raise StaleMessage(
                f"{num_blocks} blocks, the ticket allows {self.ticket.num_blocks}",
                param="num_blocks",
            )
        if self.generation or not self.is_in(TransferState.RESERVED):  # else after `withdraw`
            self.move_to(TransferState.RESERVED)
        self.generation = generation
        self.block_tables = block_tables
        self.num_cached = num_cached
        self.num_tokens = num_tokens
        self._layout = layout

    def withdraw(self) -> None:
        """The sender has not taken the grant, and never will: there may be another."""
        self.generation = 0
        self.block_tables = ()

    def check_current(self, ticket: Ticket, generation: int) -> None:
        """Raise StaleMessage unless a message names this hand-off as it is now."""
        self.check_same(ticket)
        if self.generation == 0 or generation != self.generation:
            raise StaleMessage(
                f"{self.key} is in generation {self.generation}, not {generation}",
                param="generation",
            )

    def knows(self, piece: Piece) -> bool:
        """Whether it was announced before, under the same incarnation."""
        known = self._pieces.get(piece.index)
        return known is not None and known.piece.incarnation == piece.incarnation

    def announce(self, piece: Piece) -> Verdict:
        """A piece was announced. NEW: post receives for it. A piece announced before is posted
        again only under a newer incarnation, or if it was written and could not be read."""
        self.check_current(piece.ticket, piece.generation)
        known = self._pieces.get(piece.index)
        if known is not None:
            return self._announce_again(known, piece)
        if self.state is not TransferState.MOVING:
            self.move_to(TransferState.MOVING)
        self._cover(piece)
        self._pieces[piece.index] = _Posted(piece)
        return Verdict.NEW

    def cells(self, piece: Piece) -> Cells:
        """The cells of an announced piece in decode's blocks."""
        return cells_in(
            self.block_tables,
            self._layout,
            self.num_tokens,
            size=self.cell_size,
            first=piece.first_cell,
            count=piece.num_cells,
        )

    def _cover(self, piece: Piece) -> None:
        """Count what a new piece covers. The first one decides the size of cells."""
        size = cell_size(self._layout.block_size, piece.prefill_layout.block_size)
        if self._coverage is None:
            self.cell_size = size
            self._coverage = Coverage.of(
                self._layout,
                cell_size=size,
                num_tokens=self.num_tokens,
                num_cached=self.num_cached,
            )
        if size != self.cell_size:
            raise StaleMessage(f"{self.key} came in other blocks before", param="block_size")
        self._coverage.add(piece.first_cell, piece.num_cells, piece.first_layer, piece.num_layers)

    def _announce_again(self, known: _Posted, piece: Piece) -> Verdict:
        if _rectangle(known.piece) != _rectangle(piece):
            raise StaleMessage(f"piece {piece.index} was another one before", param="index")
        if piece.incarnation < known.piece.incarnation:
            raise StaleMessage(f"piece {piece.index} has a newer incarnation", param="incarnation")
        written = known.state is PieceState.LOST and piece.backend in ONE_SIDED  # read it again
        if piece.incarnation == known.piece.incarnation and not written:
            return Verdict.REPEAT
        if self.state is not TransferState.MOVING:
            raise StaleMessage(f"hand-off of {self.key} is {self.state}", param="generation")
        self._pieces[piece.index] = _Posted(piece)
        return Verdict.NEW

    def arrived(self, index: int, incarnation: int, *, checksum: int) -> None:
        """All ranks have received this piece."""
        posted = self._pieces[index]
        if posted.piece.incarnation == incarnation:
            posted.move_to(PieceState.ARRIVED)
            posted.checksum = checksum

    def lost(self, index: int, incarnation: int) -> bool:
        """The piece failed; True when no newer posting replaces it yet."""
        posted = self._pieces[index]
        if posted.piece.incarnation != incarnation or self.state is not TransferState.MOVING:
            return False
        posted.move_to(PieceState.LOST)
        return True

    @property
    def is_settled(self) -> bool:
        """Whether no announced piece is still on its way."""
        return all(a.state is not PieceState.POSTED for a in self._pieces.values())

    @property
    def lost_pieces(self) -> list[int]:
        """Indices of the pieces that failed and were not announced again."""
        return sorted(n for n, a in self._pieces.items() if a.state is PieceState.LOST)

    def check_new(self, commit: Commit) -> None:
        """Raise when a commit was refused before: a late copy of it does not prove that the pieces
        that were lost then have come again."""
        if commit.number < self.num_refused:
            if self.lost_pieces:
                raise PiecesLost(self.lost_pieces)
            raise StaleMessage(f"commit {commit.number} of {self.key} was refused", param="commit")

    def commit(self, commit: Commit) -> Verdict:
        """Take the sequence over. Raises HandoffFailed naming what is missing or differs; then the
        caller ends the hand-off."""
        self.check_current(commit.ticket, commit.generation)
        if self.state is TransferState.COMMITTED:
            if commit != self.commit_message:
                raise StaleMessage(f"{self.key} was committed with other content", param="commit")
            return Verdict.REPEAT
        if self.state in ENDED:
            raise StaleMessage(f"hand-off of {self.key} is {self.state}", param="generation")
        self._prove(commit)
        self.move_to(TransferState.COMMITTED)
        self.commit_message = commit
        return Verdict.NEW

    def _prove(self, commit: Commit) -> None:
        found = self._pieces
        missing = sorted(n for n, a in found.items() if a.state is not PieceState.ARRIVED)
        if missing:
            raise HandoffFailed(f"{self.key}: pieces {missing} did not arrive", param="num_pieces")
        for name, theirs, mine in (
            ("num_pieces", commit.num_pieces, len(found)),
            ("num_blocks", commit.num_blocks, len(self.writable)),
            ("checksum", commit.checksum, combine([a.checksum for a in found.values()])),
        ):
            if theirs != mine:
                raise HandoffFailed(f"{self.key}: {name} is {theirs}, arrived {mine}", param=name)
        if not self._complete:
            raise HandoffFailed(f"{self.key}: not all blocks were sent", param="num_blocks")

    @property
    def _complete(self) -> bool:
        if self._coverage is None:  # no piece has come
            return self.num_cached * self._layout.block_size >= self.num_tokens
        return self._coverage.complete


def _rectangle(piece: Piece) -> tuple[int, int, int, int]:
    return piece.first_cell, piece.num_cells, piece.first_layer, piece.num_layers


@dataclass(slots=True, kw_only=True, eq=False)
class OutboundHandoff(HandoffState):
    """On prefill: takes the grant, splits pushes into pieces, sums them up for the commit."""

    grant_message: Grant | None = None
    tokens: tuple[int, ...] | None = None
    held: int | None = None
    num_pieces: int = 0
    cell_size: int = 0
    _num_held: int = 0  # cells of prefill's blocks that hold the prompt
    _coverage: Coverage | None = None
    _sent: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self._sent.values())

    @property
    def generation(self) -> int:
        return 0 if self.grant_message is None else self.grant_message.generation

    def grant(self, grant: Grant, block_size: int) -> Verdict:
        """Decode holds blocks, of its own size; `block_size` is prefill's."""
        self.check_same(grant.ticket)
        if self.grant_message is not None:
            if grant != self.grant_message:
                raise StaleMessage(f"{self.key} was granted before", param="generation")
            return Verdict.REPEAT
        if grant.decode.epoch != self.peer.epoch:
            raise StaleMessage(f"{self.key} is for another decode worker", param="epoch")
        check_grant(grant)
        self.move_to(TransferState.RESERVED)
        self.grant_message = grant
        self.cell_size = cell_size(block_size, grant.layout.block_size)
        self._num_held = -(-grant.num_tokens // block_size) * block_size // self.cell_size
        self._coverage = Coverage.of(
            grant.layout,
            cell_size=self.cell_size,
            num_tokens=grant.num_tokens,
            num_cached=grant.num_cached_blocks,
        )
        return Verdict.NEW

    def cell_number(self, area: Area) -> int:
        """The number of an area's first cell among those of all KV groups."""
        assert self._coverage is not None
        return area.group * self._coverage.num_cells + area.first_cell

    def push(self, area: Area, *, max_cells: int) -> list[tuple[int, Area]]:
        """Accept a rectangle of finished cells; the pieces to send, with their indices. Skipped are
        cells that decode has or does not need, and those beyond the last token."""
        coverage = self._coverage
        if coverage is None:
            raise StaleMessage(f"{self.key} has no grant", param="key")
        first = max(area.first_cell, coverage.unsent[area.group])
        end = area.first_cell + area.num_cells
        if end <= self._num_held:
            end = min(end, coverage.num_cells)
        if first >= end:
            return []
        if end > coverage.num_cells:
            raise coverage.outside(first, end)
        number = area.group * coverage.num_cells + first
        coverage.add(number, end - first, area.first_layer, area.num_layers)
        if self.state is TransferState.RESERVED:
            self.move_to(TransferState.MOVING)
        pieces = []
        for start in range(first, end, max_cells):
            part = Area(
                group=area.group,
                first_cell=start,
                num_cells=min(max_cells, end - start),
                first_layer=area.first_layer,
                num_layers=area.num_layers,
            )
            pieces.append((self.num_pieces, part))
            self.num_pieces += 1
        return pieces

    def sent(self, index: int, *, num_bytes: int, checksum: int) -> None:
        """All ranks have sent this piece."""
        self._sent[index] = (num_bytes, checksum)

    @property
    def is_pushed(self) -> bool:
        return self._coverage is not None and self._coverage.complete

    def committing(self, tokens: tuple[int, ...], *, held: int | None = None) -> None:
        """Everything was pushed. Raises ValueError when it was not."""
        if not self.is_pushed:
            raise ValueError(f"{self.key}: commit before all blocks were pushed")
        self.tokens, self.held = tokens, held

    def commit_request(self, written: tuple[Piece, ...] = (), number: int = 0) -> Commit:
        """The proof to send once every piece is out; `number` were refused before."""
        grant = self.grant_message
        assert grant is not None
        assert self.tokens is not None
        return Commit(
            key=self.key,
            ticket=self.ticket,
            generation=grant.generation,
            tokens=self.tokens,
            held=self.held,
            num_pieces=self.num_pieces,
            num_blocks=num_writable(grant),
            checksum=combine([checksum for _, checksum in self._sent.values()]),
            written=written,
            number=number,
        )
