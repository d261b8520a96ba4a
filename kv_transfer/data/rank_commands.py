"""Commands of rank 0 to every rank's data plane, and their results.

A hand-off is named by (receiver_epoch, generation), which no two hand-offs of a cluster share. A
link is named by the epochs and ranks of its two ends and by its incarnation.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import cache

from kv_transfer.plan.reshard import HeadRange, reshard
from protocol import codec
from protocol.errors import BatonError, ErrorInfo, Internal
from protocol.kv_layout import Cells, KVLayout
from protocol.message import Message
from protocol.messages import Grant, LinkOffer


class Part(Message):
    """One message of a piece: `num_heads` heads from `first_head` (within this rank) to or from a
    peer rank.

    `endpoint` is where the receiving rank listens and `peer_first_head` where its heads begin
    there; receivers leave both empty.
    """

    peer_rank: int
    first_head: int
    endpoint: str = ""
    peer_first_head: int = 0
    num_heads: int


#: What each rank of one worker sends or receives of every piece of a hand-off.
Parts = dict[int, tuple[Part, ...]]


def sent_parts(layout: KVLayout, peer: Grant | LinkOffer, backend: str) -> Parts:
    """What ranks of this `layout` send to a decode worker over its links of one backend."""
    parts: dict[int, list[Part]] = {}
    endpoints = {link.rank: link.endpoint for link in peer.links if link.backend == backend}
    for slice_ in reshard(layout.rank_heads, peer.layout.rank_heads):
        part = Part(
            peer_rank=slice_.dest_rank,
            first_head=slice_.source_heads[0],
            num_heads=slice_.num_heads,
            endpoint=endpoints[slice_.dest_rank],
            peer_first_head=slice_.dest_heads[0],
        )
        parts.setdefault(slice_.source_rank, []).append(part)
    return {rank: tuple(own) for rank, own in parts.items()}


@cache
def received_parts(source: tuple[HeadRange, ...], dest: tuple[HeadRange, ...]) -> Parts:
    """What the `dest` ranks receive from the `source` ranks, by the heads that they hold."""
    parts: dict[int, list[Part]] = {}
    for slice_ in reshard(source, dest):
        part = Part(
            peer_rank=slice_.source_rank,
            first_head=slice_.dest_heads[0],
            num_heads=slice_.num_heads,
        )
        parts.setdefault(slice_.dest_rank, []).append(part)
    return {rank: tuple(own) for rank, own in parts.items()}


class MoveCommand(Message):
    """Send or receive one rank's messages of piece `index`. `rank` is the rank that runs the
    command, `cells` lie in its worker's blocks, `peer_cells` (senders only) in the receiver's.
    `backend` may be left out where a rank has only one. `dtype`: of the values on their way, as
    `reshard.travelling_dtype`; empty: as in the rank's pool. A sender's cells are complete once the
    rank's engine has run step `after`; 0 when they are."""

    rank: int
    sender_epoch: int
    receiver_epoch: int
    incarnation: int
    generation: int
    index: int
    cells: Cells
    first_layer: int
    num_layers: int
    discard: bool = False  # a send whose content no longer matters but which the receiver awaits
    backend: str = ""
    dtype: str = ""
    peer_cells: Cells | None = None
    after: int = 0
    parts: tuple[Part, ...]


class OpenCommand(Message):
    """Build one rank's ends of links before anything moves on them. Fields as in MoveCommand
    and Part; a receiver leaves the endpoints empty."""

    rank: int
    sender_epoch: int
    receiver_epoch: int
    incarnation: int
    backend: str
    peers: tuple[tuple[int, str], ...]  # rank, endpoint
    sending: bool


class RevokeCommand(Message):
    """Stop touching the blocks of this hand-off. Answered once no access is in progress."""

    receiver_epoch: int
    generation: int


class CloseCommand(Message):
    """Close the links between two workers up to `incarnation`; blocked messages on them fail.

    `forget` drops the record of them: only when nothing was moving or the peer is dead.
    """

    sender_epoch: int
    receiver_epoch: int
    forget: bool = False
    incarnation: int


class ReadyCommand(Message):
    """Answer once step `after` of this rank's engine has written its KV up to and with `layer`."""

    after: int
    layer: int


class ListenCommand(Message):
    """Start listening for links, if not yet done; answer the endpoints."""


class Listening(Message):
    """Where one backend of a rank can be reached."""

    backend: str
    endpoint: str


class RankCommand(Message):
    """Exactly one of these."""

    send: MoveCommand | None = None
    receive: MoveCommand | None = None
    revoke: RevokeCommand | None = None
    open: OpenCommand | None = None
    close: CloseCommand | None = None
    listen: ListenCommand | None = None
    ready: ReadyCommand | None = None

    def encode(self) -> bytes:
        """The bytes for DataPlane.execute, to send to a rank in another process."""
        return codec.encode(self)


class PartResult(Message):
    """One message moved: its size and checksum."""

    num_bytes: int
    checksum: int


class RankResult(Message):
    """A rank's answer to any command. With `error` set nothing else counts. Not `answered`: the
    rank cannot be reached, and unless it is dead it may still run the command."""

    error: ErrorInfo | None = None
    answered: bool = True
    parts: tuple[PartResult, ...] = ()
    listening: tuple[Listening, ...] = ()  # the most direct first


#: Takes the result of a command, once, in any thread.
Finish = Callable[[RankResult], None]


def pass_on(rank: int, finish: Finish, call: Future[bytes]) -> None:
    """Finish a command with what a rank in another process has answered, or why it did not."""
    try:
        result = codec.decode(RankResult, call.result())
    except Exception as error:  # noqa: BLE001 - a thread's edge: the command must end
        result = unanswered(rank, error)
    finish(result)


def unanswered(rank: int, error: Exception) -> RankResult:
    """The result of a command that could not be given to a rank, or was not answered."""
    if not isinstance(error, BatonError):
        error = Internal(f"rank {rank}: {type(error).__name__}: {error}")
    return RankResult(error=error.info(), answered=False)


def open_commands(
    parts: Parts,
    *,
    sender_epoch: int,
    receiver_epoch: int,
    incarnation: int,
    backend: str,
    sending: bool,
) -> dict[int, RankCommand]:
    """What each rank of one worker has to do to open all links of a channel."""
    return {
        rank: RankCommand(
            open=OpenCommand(
                rank=rank,
                sender_epoch=sender_epoch,
                receiver_epoch=receiver_epoch,
                incarnation=incarnation,
                backend=backend,
                peers=tuple((part.peer_rank, part.endpoint) for part in own),
                sending=sending,
            )
        )
        for rank, own in parts.items()
    }
