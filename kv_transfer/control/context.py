"""One worker's side of all its hand-offs: who it is, and how it reaches its ranks and its peers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kv_transfer.config import TransferConfig
from kv_transfer.control.calls import UNANSWERED, CallResult
from kv_transfer.control.clock import Clock
from kv_transfer.control.rank_channel import RankChannel, first_error, run_orders
from kv_transfer.data.rank_commands import RankCommand, RankResult, RevokeCommand
from protocol.errors import BatonError, StaleMessage, Unavailable
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.ticket import Ticket
from rpc.client import ClientPool
from rpc.methods import Method, Rep, Req

_FIRST_PAUSE_S = 0.05


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
    clock: Clock = Clock()  # noqa: RUF009 - frozen

    def check_ticket(
        self, ticket: Ticket, key: RequestKey, peer_epoch: int, *, genuine: Ticket | None = None
    ) -> None:
        """Raise StaleMessage unless the ticket is genuine, and for this request, this worker and
        that peer. One equal to `genuine`, which was checked before, needs no look at its
        signature."""
        if ticket.key != key:
            raise StaleMessage(f"ticket of {ticket.key} used for {key}", param="ticket")
        if ticket != genuine:
            ticket.verify(self.secret)
        mine, theirs = ticket.decode_epoch, ticket.prefill_epoch
        if self.ref.role is Role.PREFILL:
            mine, theirs = theirs, mine
        if mine != self.ref.epoch:
            raise StaleMessage(f"ticket of {ticket.key} is for another incarnation", param="epoch")
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

    async def run_everywhere(self, order: RankCommand) -> list[RankResult]:
        """Run one order on every rank."""
        return await run_orders(self.ranks, dict.fromkeys(range(self.layout.tp_size), order))

    async def fence(self, receiver_epoch: int, generation: int) -> bool:
        """Have no rank touch the blocks of a hand-off any more: messages pass through staging
        buffers, so this takes at most one copy. False when a rank cannot be asked."""
        revoke = RevokeCommand(receiver_epoch=receiver_epoch, generation=generation)
        return first_error(await self.run_everywhere(RankCommand(revoke=revoke))) is None
