"""A sender's end of the channel to one decode worker (plan.channel): announces and sends pieces in
order, and renews the channel when the two ends may be out of step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from concurrency.event_loop import Tasks
from kv_transfer.backends.base import LinkBroken
from kv_transfer.backends.choice import choose_backend
from kv_transfer.config import ONE_SIDED
from kv_transfer.control.context import EndpointContext, first_error
from kv_transfer.control.endpoint import TransferStats
from kv_transfer.control.outgoing import OutgoingPiece, Route
from kv_transfer.data.rank_commands import (
    CloseCommand,
    RankCommand,
    RankResult,
    open_commands,
    sent_parts,
)
from kv_transfer.plan.channel import REACTIONS, Next, Reply
from kv_transfer.plan.reshard import (
    cell_size,
    cells_per_piece,
    check_fingerprint,
    check_layout,
    travelling_dtype,
)
from observability.logging import get_logger
from protocol.errors import BatonError, HandoffFailed, StaleMessage
from protocol.ids import WorkerRef
from protocol.messages import Grant, OpenLinks
from rpc import methods

log = get_logger(__name__)


class _Failed(Exception):
    """An attempt on `incarnation` failed; the piece may be tried again on another."""

    def __init__(self, incarnation: int, error: BatonError) -> None:
        super().__init__(error.message)
        self.incarnation = incarnation
        self.error = error


class SenderChannel:
    """All pieces to one decode worker pass here, up to `pipeline_depth` at a time. Announcements do
    not wait for each other, and data of earlier pieces keeps moving meanwhile. `numbers` counts the
    incarnations and turns of all of a sender's channels."""

    def __init__(
        self,
        decode: WorkerRef,
        context: EndpointContext,
        tasks: Tasks,
        stats: TransferStats,
        numbers: Iterator[int],
    ) -> None:
        self.decode = decode
        self.num_users = 0  # hand-offs
        self.incarnation = next(numbers)
        self._context = context
        self._config = context.config
        self._tasks = tasks
        self._stats = stats
        self._numbers = numbers
        self._slots = asyncio.Semaphore(self._config.pipeline_depth)
        self._last_turn: asyncio.Future[None] | None = None  # done once that turn is over
        self._refused_backends: set[str] = set()  # those that did not reach this worker
        self._route_key: object = None
        self._route = Route()

    @property
    def is_idle(self) -> bool:
        return self.num_users == 0

    def route(self, grant: Grant) -> Route:
        """How the pieces of a hand-off travel; computed once for grants that are alike. Raises
        HandoffFailed naming what does not fit."""
        route_key = grant.fingerprint, grant.layout, grant.links
        if route_key != self._route_key:
            layout = self._context.layout
            check_fingerprint(self._context.fingerprint, grant.fingerprint)
            check_layout(layout, grant.layout)
            backend = choose_backend(
                self._config.backend,
                grant.links,
                num_ranks=grant.layout.tp_size,
                refused=self._refused_backends,
            )
            dtype, limit = travelling_dtype(layout, grant.layout), self._config.piece_bytes(backend)
            size = cell_size(layout.block_size, grant.layout.block_size)
            self._route = Route(
                backend=backend,
                parts=sent_parts(layout, grant, backend),
                dtype=dtype,
                max_cells=cells_per_piece(layout, size, limit, dtype),
                one_sided=backend in ONE_SIDED,
            )
            self._route_key = route_key
        return self._route

    def refuse(self, backend: str) -> None:
        """This backend does not reach the worker: the next hand-off tries another."""
        self._refused_backends.add(backend)
        self._route_key = None

    async def warm_up(self) -> None:
        """Build the links before hand-offs need them: an NCCL pair takes half a second. Never
        raises: a link that cannot be built now is built by the first piece that needs it."""
        incarnation = self.incarnation
        try:
            await self._open_links(incarnation)
        except BatonError as error:
            self.renew(incarnation)
            who = self.decode.worker_id
            log.info("no links ahead of hand-offs", extra={"decode": who, "reason": error.message})

    async def _open_links(self, incarnation: int) -> None:
        context, timeout_s = self._context, self._config.rpc_timeout_s
        client = context.clients.get(self.decode.address)
        request = OpenLinks(prefill=context.ref, prefill_layout=context.layout)
        offer = await client.call(methods.OPEN_LINKS, request, timeout_s=timeout_s)
        check_layout(context.layout, offer.layout)
        backend = choose_backend(
            self._config.backend,
            offer.links,
            num_ranks=offer.layout.tp_size,
            refused=self._refused_backends,
        )
        if backend not in ONE_SIDED:  # decode's ranks have to accept
            request = OpenLinks(
                prefill=context.ref,
                prefill_layout=context.layout,
                incarnation=incarnation,
                backend=backend,
            )
            await client.call(methods.OPEN_LINKS, request, timeout_s=timeout_s)
        commands = open_commands(
            sent_parts(context.layout, offer, backend),
            sender_epoch=context.ref.epoch,
            receiver_epoch=self.decode.epoch,
            incarnation=incarnation,
            backend=backend,
            sending=True,
        )
        if (failure := first_error(await context.run(commands))) is not None:
            raise failure

    async def deliver(self, piece: OutgoingPiece) -> list[RankResult]:
        """Announce and send one piece; the result of every source rank. Raises the decode worker's
        refusal, or HandoffFailed when the last attempt failed too. Never leaves a send in
        flight."""
        if piece.ready is not None:
            failed = first_error(await self._context.run({0: RankCommand(ready=piece.ready)}))
            if failed is not None:
                raise failed
        attempt = self._write if piece.handoff.route.one_sided else self._announce_and_send
        error: BatonError = HandoffFailed("no attempt was made")
        for _ in range(self._config.piece_attempts):
            try:
                return await attempt(piece)
            except _Failed as failure:
                self.renew(failure.incarnation)
                error = failure.error
        raise error

    async def _write(self, piece: OutgoingPiece) -> list[RankResult]:
        """One-sided write: no announcement; the commit lists the pieces. No timeout: a launched
        kernel always finishes."""
        incarnation = self._check_wanted(piece)
        results = await self._move(piece, piece.start_moving(incarnation, discard=False))
        return _check(results, incarnation)

    async def _announce_and_send(self, piece: OutgoingPiece) -> list[RankResult]:
        async with self._slots:
            moving = None
            while moving is None:  # too late for its turn: the next one
                incarnation, moving = await self._announce(piece)
            # Not cancelled: the hand-off has to know until when its blocks are read.
            await asyncio.wait({moving}, timeout=self._send_timeout_s)
        if not moving.done():
            raise _Failed(incarnation, HandoffFailed("the ranks did not send in time"))
        return _check(moving.result(), incarnation)

    @property
    def _send_timeout_s(self) -> float:
        """Longer than any send may take: building the link, and all pieces that may be queued."""
        config = self._config
        return config.connect_timeout_s + config.op_timeout_s * (config.pipeline_depth + 1)

    async def _announce(
        self, piece: OutgoingPiece
    ) -> tuple[int, asyncio.Task[list[RankResult]] | None]:
        """Take a turn: the incarnation used, and the running send or None when the turn came too
        late."""
        incarnation = self._check_wanted(piece)
        previous, turn = self._last_turn, asyncio.get_running_loop().create_future()
        self._last_turn = turn
        announcement = piece.announcement(incarnation, next(self._numbers))
        try:
            answer = await self._context.call(self.decode, methods.PIECE, announcement)
            if previous is not None and not previous.done():
                await asyncio.wait({previous})
            reaction = REACTIONS[Reply.of(answer.error, uncertain=answer.uncertain)]
            if reaction.renew:
                self.renew(incarnation)
            if reaction.next is Next.FAIL:
                assert answer.error is not None
                raise answer.error
            if incarnation != self.incarnation:  # renewed, by this piece or another
                raise _Failed(incarnation, LinkBroken("channel renewed"))
            if reaction.next is Next.ANNOUNCE:
                return incarnation, None
            commands = piece.start_moving(incarnation, discard=not piece.wanted)
            return incarnation, self._tasks.start(self._move(piece, commands))
        finally:
            turn.set_result(None)

    def _check_wanted(self, piece: OutgoingPiece) -> int:
        """The current incarnation. Raises StaleMessage when the hand-off is over."""
        if not piece.wanted:
            raise StaleMessage("the hand-off is over", param="key")
        return self.incarnation

    async def _move(
        self, piece: OutgoingPiece, commands: dict[int, RankCommand]
    ) -> list[RankResult]:
        results = await self._context.run(commands)
        piece.stop_moving(results)
        return results

    def renew(self, incarnation: int) -> None:
        """Leave an incarnation that may be broken or out of step; what blocks on it fails."""
        if incarnation == self.incarnation:
            self.incarnation = next(self._numbers)
            self._stats.relinked += 1
            self._tasks.start(self._close(incarnation, forget=False))

    async def close(self) -> None:
        """Close the links for good; messages in flight fail. An announcement in flight takes the
        number that follows: no link is opened a second time."""
        incarnation, self.incarnation = self.incarnation, next(self._numbers)
        await self._close(incarnation, forget=True)

    async def _close(self, incarnation: int, *, forget: bool) -> None:
        close = CloseCommand(
            sender_epoch=self._context.ref.epoch,
            receiver_epoch=self.decode.epoch,
            incarnation=incarnation,
            forget=forget,
        )
        await self._context.run_everywhere(RankCommand(close=close))


def _check(results: list[RankResult], incarnation: int) -> list[RankResult]:
    if (failure := first_error(results)) is not None:
        raise _Failed(incarnation, failure)
    return results
