"""A receiver's view of the prefill workers that send to it: connections, and what to receive on
them."""

from __future__ import annotations

from collections import OrderedDict

from concurrency.tasks import Tasks
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.finished_handoffs import BoundedMap
from kv_transfer.control.rank_channel import RankChannel, run_order
from kv_transfer.data.rank_commands import CloseCommand, ListenCommand, RankCommand
from protocol.errors import HandoffFailed, StaleMessage
from protocol.messages import LinkAddress


class ReceiverChannel:
    """The connections from one incarnation of a prefill worker: the newest incarnation of them that
    was named, the newest known to be broken, and the turn of the last piece that was posted.
    Whatever was named up to `broken` is over: its sender may be alive and think otherwise."""

    def __init__(self, epoch: int, broken: int = 0) -> None:
        self.epoch = epoch
        self.link = broken
        self.broken = broken
        self.turn = 0
        self.moving = 0

    def use(self, link: int) -> None:
        """A piece names `link`. Raises StaleMessage when a newer one was named, HandoffFailed when
        it is broken here; both name `link`, on which the sender takes a new one."""
        if link < self.link:
            raise StaleMessage(f"link {link} was replaced by {self.link}", param="link")
        if link <= self.broken:
            raise HandoffFailed(f"link {link} is broken", param="link")
        self.link = link

    def take(self, turn: int) -> None:
        """Post a piece next. Raises HandoffFailed naming `turn` when one of a later turn was: its
        sender will not send in that order."""
        if turn <= self.turn:
            raise HandoffFailed(f"turn {turn} is past, {self.turn} was posted", param="turn")
        self.turn = turn


async def listen(ranks: RankChannel, num_ranks: int) -> tuple[LinkAddress, ...]:
    """Make every rank listen. Raises HandoffFailed when one cannot."""
    links: list[LinkAddress] = []
    for rank in range(num_ranks):
        outcome = await run_order(ranks, rank, RankCommand(listen=ListenCommand()))
        if outcome.error is not None:
            raise HandoffFailed(f"rank {rank} cannot listen: {outcome.error.message}")
        links += [
            LinkAddress(rank=rank, backend=way.backend, endpoint=way.endpoint)
            for way in outcome.listening
        ]
    return tuple(links)


class ReceiverChannels:
    """The prefill workers heard of lately; the connections of the least recently used idle one are
    closed when there are more than `max_peers`. Which were closed is remembered: a worker that was
    only silent may still send on them what this side has dropped."""

    def __init__(self, party: EndpointContext, tasks: Tasks) -> None:
        self._me = party
        self._limit = party.config.max_peers
        self._tasks = tasks
        self._peers: OrderedDict[int, ReceiverChannel] = OrderedDict()
        self._closed: BoundedMap[int, int] = BoundedMap(party.config.remembered)  # links by epoch

    def get(self, epoch: int) -> ReceiverChannel:
        """The peer of this epoch, now the most recently used."""
        peer = self._peers.get(epoch)
        if peer is None:
            self._make_room()
            peer = self._peers[epoch] = ReceiverChannel(epoch, self._closed.take(epoch) or 0)
        self._peers.move_to_end(epoch)
        return peer

    async def forget(self, epoch: int) -> None:
        """Close a peer's connections; what is moving on them fails."""
        peer = self._peers.pop(epoch, None)
        if peer is not None:
            await self._close(peer)

    def _make_room(self) -> None:
        surplus = len(self._peers) + 1 - self._limit
        idle = [peer for peer in self._peers.values() if peer.moving == 0]
        for peer in idle[: max(0, surplus)]:
            del self._peers[peer.epoch]
            self._tasks.start(self._close(peer))

    async def _close(self, peer: ReceiverChannel) -> None:
        self._closed.put(peer.epoch, peer.link)
        close = CloseCommand(
            sender_epoch=peer.epoch, receiver_epoch=self._me.ref.epoch, link=peer.link, forget=True
        )
        await self._me.run_everywhere(RankCommand(close=close))
