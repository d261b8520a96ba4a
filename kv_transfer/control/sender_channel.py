"""A sender's channel to one incarnation of a decode worker: pieces in order, links renewed when
broken."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict

from concurrency.tasks import Tasks
from kv_transfer.backends.base import LinkBroken
from kv_transfer.backends.choice import choose_backend
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.outgoing import PieceOut
from kv_transfer.control.rank_channel import first_error, run_orders
from kv_transfer.control.stats import TransferStats
from kv_transfer.data.rank_commands import CloseCommand, Parts, RankCommand, RankResult, sent_parts
from kv_transfer.plan.reshard import check_fingerprint, check_layout
from protocol.errors import BatonError, HandoffFailed, StaleMessage
from protocol.ids import WorkerRef
from protocol.messages import Grant
from rpc import methods

#: The link used, what the ranks have answered, and what went wrong before they could.
_Attempt = tuple[int, list[RankResult], BatonError | None]


class SenderChannel:
    """All pieces to one decode worker pass here.

    Both sides run the messages of a link in order, so the order must be the same on both: every
    announcement carries its turn, decode takes none that comes too late for it, and data is queued
    in the order of the turns. Announcements do not wait for each other, and data of earlier pieces
    keeps moving meanwhile, up to `pipeline_depth` pieces at a time.

    `link` is the incarnation of the connections. As soon as it is unsure whether both sides are in
    step, it is renewed: decode then drops whatever it had posted on the old one.
    """

    def __init__(self, decode: WorkerRef, channels: SenderChannels) -> None:
        self.decode = decode
        self.users = 0
        self.refused: set[str] = set()  # backends that did not reach this worker
        self._channels = channels
        self._me = channels.party
        self._config = channels.party.config
        self._slots = asyncio.Semaphore(self._config.pipeline_depth)
        self._last: asyncio.Future[None] | None = None  # done once the last turn is over
        self._link = channels.next_number()
        self._asked: object = None  # what `_route` is the answer to
        self._route: tuple[str, Parts] = ("", {})

    @property
    def link(self) -> int:
        """The incarnation of the connections that is good now, as far as is known."""
        return self._link

    def route(self, grant: Grant) -> tuple[str, Parts]:
        """The backend for a hand-off, and what each source rank sends by it; the same for all that
        are granted alike. Raises HandoffFailed naming what does not fit."""
        asked = grant.fingerprint, grant.layout, grant.links
        if asked != self._asked:
            check_fingerprint(self._me.fingerprint, grant.fingerprint)
            check_layout(self._me.layout, grant.layout)
            backend = choose_backend(
                self._config.backend,
                grant.links,
                num_ranks=grant.layout.tp_size,
                refused=self.refused,
            )
            self._route = backend, sent_parts(self._me.layout, grant, backend)
            self._asked = asked
        return self._route

    def refuse(self, backend: str) -> None:
        """This backend does not reach the worker: the next hand-off tries another."""
        self.refused.add(backend)
        self._asked = None

    async def deliver(self, job: PieceOut) -> list[RankResult]:
        """Announce and send one piece; every source rank's outcome. Raises the decode worker's
        refusal, or HandoffFailed when the last attempt failed too. Never leaves a send in
        flight."""
        error: BatonError = HandoffFailed("no attempt was made")
        if job.ready is not None:
            failed = first_error(
                await run_orders(self._me.ranks, {0: RankCommand(ready=job.ready)})
            )
            if failed is not None:
                raise failed
        attempt = self._write if job.one_sided else self._announce_and_send
        for _ in range(self._config.piece_attempts):
            link, outcomes, failure = await attempt(job)
            if failure is None:
                failure = first_error(outcomes)
            if failure is None:
                return outcomes
            self.renew(link)
            error = failure
        raise error

    async def _write(self, job: PieceOut) -> _Attempt:
        """The grant allows it, nothing is posted for it, and the commit will name it. It ends by
        itself."""
        if not job.alive:
            raise StaleMessage("the hand-off is over", param="key")
        link = self._link
        return link, await self._move(job, job.orders(link, discard=False)), None

    async def _announce_and_send(self, job: PieceOut) -> _Attempt:
        async with self._slots:
            link, moving = await self._announce(job)
            while moving is None and link == self._link:  # too late for its turn: the next one
                link, moving = await self._announce(job)
            if moving is None:
                return link, [], LinkBroken("link replaced")
            # Not cancelled: the hand-off has to know until when its blocks are read.
            await asyncio.wait({moving}, timeout=self._limit_s())
        if not moving.done():
            return link, [], HandoffFailed("the ranks did not send in time")
        return link, moving.result(), None

    def _limit_s(self) -> float:
        """Longer than any order may take: building the link, and all pieces that may be queued."""
        config = self._config
        return config.connect_timeout_s + config.op_timeout_s * (config.pipeline_depth + 1)

    async def _announce(self, job: PieceOut) -> tuple[int, asyncio.Task[list[RankResult]] | None]:
        """Take a turn: the link used and the running send, or None when that came to nothing."""
        if not job.alive:
            raise StaleMessage("the hand-off is over", param="key")
        before, turn = self._last, asyncio.get_running_loop().create_future()
        self._last = turn
        link = self._link
        piece = job.announcement(link, self._channels.next_number())
        try:
            answer = await self._me.call(self.decode, methods.PIECE, piece)
            if before is not None and not before.done():
                await asyncio.wait({before})
            if answer.error is None:
                if link != self._link:
                    return link, None
                orders = job.orders(link, discard=not job.alive)
                return link, self._channels.tasks.start(self._move(job, orders))
            if answer.uncertain or answer.error.param == "link":
                self.renew(link)
            if answer.refused and answer.error.param in ("link", "turn"):
                return link, None
            raise answer.error
        finally:
            turn.set_result(None)

    async def _move(self, job: PieceOut, orders: dict[int, RankCommand]) -> list[RankResult]:
        outcomes = await run_orders(self._me.ranks, orders)
        job.moved(outcomes)
        return outcomes

    def renew(self, link: int) -> None:
        """Leave a link that may be broken or out of step; what is blocked on it fails at once."""
        if link == self._link:
            self._link = self._channels.next_number()
            self._channels.stats.relinked += 1
            self._channels.tasks.start(self._close(link, forget=False))

    async def forget(self) -> None:
        """Close the links for good; what is in flight fails. An announcement that is under way
        takes the number that follows: no link is opened a second time."""
        link, self._link = self._link, self._channels.next_number()
        await self._close(link, forget=True)

    async def _close(self, link: int, *, forget: bool) -> None:
        close = CloseCommand(
            sender_epoch=self._me.ref.epoch,
            receiver_epoch=self.decode.epoch,
            link=link,
            forget=forget,
        )
        await self._me.run_everywhere(RankCommand(close=close))


class SenderChannels:
    """A sender's channels by decode epoch, made on first use; the least recently used idle one is
    closed when there are more than `max_peers`. Numbers all links and turns, so that no two share
    one."""

    def __init__(self, party: EndpointContext, tasks: Tasks, stats: TransferStats) -> None:
        self.party = party
        self.tasks = tasks
        self.stats = stats
        self._numbers = itertools.count(1)
        self._channels: OrderedDict[int, SenderChannel] = OrderedDict()

    def get(self, decode: WorkerRef) -> SenderChannel:
        """The channel to a decode worker, now the most recently used."""
        channel = self._channels.get(decode.epoch)
        if channel is None:
            self._make_room()
            channel = SenderChannel(decode, self)
            self._channels[decode.epoch] = channel
        self._channels.move_to_end(decode.epoch)
        return channel

    def lacks(self, epoch: int) -> bool:
        """Whether there is no channel to a decode worker, and room for one."""
        return epoch not in self._channels and len(self._channels) < self.party.config.max_peers

    def release(self, epoch: int) -> None:
        """A hand-off that used the channel is over."""
        channel = self._channels.get(epoch)
        if channel is not None:
            channel.users -= 1

    async def forget(self, epoch: int) -> None:
        """Close a channel's links; what is in flight fails."""
        channel = self._channels.pop(epoch, None)
        if channel is not None:
            await channel.forget()

    def next_number(self) -> int:
        """A number for a link or a turn, higher than any before."""
        return next(self._numbers)

    def _make_room(self) -> None:
        surplus = len(self._channels) + 1 - self.party.config.max_peers
        idle = [epoch for epoch, channel in self._channels.items() if channel.users == 0]
        for epoch in idle[: max(0, surplus)]:
            self.tasks.start(self._channels.pop(epoch).forget())
