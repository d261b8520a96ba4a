"""One worker's identity, and how rank 0 reaches its ranks and its peer workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kv_transfer.config import TransferConfig
from kv_transfer.data.rank_commands import (
    Finish,
    RankCommand,
    RankResult,
    RevokeCommand,
    unanswered,
)
from kv_transfer.data.threads import Values
from kv_transfer.plan.channel import UNANSWERED
from kv_transfer.plan.checksum import combine
from protocol.errors import (
    BatonError,
    HandoffFailed,
    StaleMessage,
    Unavailable,
)
from protocol.ids import RequestKey, WorkerRef
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.messages import Ticket
from rpc.client import ClientPool
from rpc.methods import Method, Rep, Req

_FIRST_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """`monotonic` times deadlines and calls; `wall` is put into spans. Tests inject their own."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """How a call ended. `error` is None when the peer acknowledged.

    `uncertain`: some try was not answered, so the peer may have acted on it whatever it says now.
    """

    error: BatonError | None
    uncertain: bool

    @property
    def refused(self) -> bool:
        """The peer answered, and refused."""
        return self.error is not None and not isinstance(self.error, UNANSWERED)


class RankChannel(Protocol):
    """Carries commands to the data planes of the worker's ranks."""

    def submit(self, rank: int, command: RankCommand, finish: Finish) -> None:
        """Give a command to a rank, which starts its commands in the order of these calls. `finish`
        is called with the result, errors inside it, unless this raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointContext:
    """What a Sender or Receiver is built from."""

    ref: WorkerRef
    layout: KVLayout
    fingerprint: KVFingerprint
    secret: bytes
    ranks: RankChannel
    clients: ClientPool
    config: TransferConfig
    clock: Clock = Clock()

    def check_ticket(
        self,
        ticket: Ticket,
        key: RequestKey,
        peer_epoch: int,
        *,
        sends: bool,
        genuine: Ticket | None = None,
    ) -> None:
        """Raise StaleMessage unless the ticket is genuine, and for this request, this worker as
        sender or receiver, and that peer. The signature is not checked again of a ticket equal to
        `genuine`, which was checked before."""
        if ticket.key != key:
            raise StaleMessage(f"ticket of {ticket.key} used for {key}", param="ticket")
        if ticket != genuine:
            ticket.verify(self.secret)
        mine, theirs = ticket.receiver_epoch, ticket.sender_epoch
        if sends:
            mine, theirs = theirs, mine
        if mine != self.ref.epoch:
            raise StaleMessage(f"ticket of {ticket.key} is for another epoch", param="epoch")
        if theirs != peer_epoch:
            raise StaleMessage(f"ticket of {ticket.key} is for another peer", param="epoch")

    async def call(
        self,
        peer: WorkerRef,
        method: Method[Req, Rep],
        request: Req,
        attempts: int | None = None,
    ) -> CallResult:
        """Call an idempotent method of a peer until it is answered, at most `attempts` times
        (None: `rpc_attempts`)."""
        error: BatonError | None = None
        for attempt in range(attempts or self.config.rpc_attempts):
            if isinstance(error, Unavailable):  # refused at once: give the peer a moment
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
            client = self.clients.get(peer.address)
            try:
                await client.call(method, request, timeout_s=self.config.rpc_timeout_s)
            except UNANSWERED as unanswered:
                error = unanswered
            except BatonError as refusal:
                return CallResult(error=refusal, uncertain=attempt > 0)
            else:
                return CallResult(error=None, uncertain=False)
        return CallResult(error=error, uncertain=True)

    async def run(self, commands: dict[int, RankCommand]) -> list[RankResult]:
        """Run one command on each of several ranks; returns when all have ended. Never raises,
        except when cancelled."""
        values: Values[RankResult] = Values(len(commands))
        for rank in reversed(commands):  # rank 0 last: the others are further away
            finish = partial(values.add, rank)
            try:
                self.ranks.submit(rank, commands[rank], finish)
            except Exception as error:  # noqa: BLE001 - the hand-off must end whatever the trouble
                finish(unanswered(rank, error))
        results = await values.all()
        return [results[rank] for rank in commands]

    async def run_everywhere(self, command: RankCommand) -> list[RankResult]:
        return await self.run(dict.fromkeys(range(self.layout.tp_size), command))

    async def fence(self, receiver_epoch: int, generation: int) -> bool:
        """Stop all ranks from touching the blocks of a hand-off: messages pass through staging
        buffers, so this takes at most one copy. False when a rank cannot be reached."""
        revoke = RevokeCommand(receiver_epoch=receiver_epoch, generation=generation)
        return first_error(await self.run_everywhere(RankCommand(revoke=revoke))) is None


def as_failure(error: BatonError, who: str) -> BatonError:
    """The failure of a hand-off whose call ended so: a refusal as it is, anything else wrapped."""
    if isinstance(error, (StaleMessage, HandoffFailed)):
        return error
    return HandoffFailed(f"{who}: {error.message}", param=error.param)


def first_error(results: list[RankResult]) -> BatonError | None:
    """The first error as a HandoffFailed, or None."""
    for result in results:
        if result.error is not None:
            return HandoffFailed(result.error.message, param=result.error.param)
    return None


def totals(results: list[RankResult]) -> tuple[int, int]:
    """Bytes and checksum of a piece that all ranks have moved."""
    parts = [part for result in results for part in result.parts]
    return sum([part.num_bytes for part in parts]), combine([part.checksum for part in parts])
