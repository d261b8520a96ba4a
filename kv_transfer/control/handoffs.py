"""Both ends of a worker's hand-offs: any worker sends KV to others and receives KV from them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from kv_transfer.control.context import EndpointContext
from kv_transfer.control.listeners import ReceiverListener, SenderListener
from kv_transfer.control.receiver import Receiver
from kv_transfer.control.sender import Sender
from protocol.errors import ErrorInfo
from protocol.ids import RequestKey
from protocol.messages import Ack, HandoffEnd
from rpc import methods
from rpc.methods import Handler, Method


class HandoffListener(SenderListener, ReceiverListener, Protocol):
    """A worker: what its sender and its receiver tell it."""

    def ended(self, key: RequestKey, error: ErrorInfo | None, *, uncertain: bool = False) -> None:
        """A hand-off, sent or received, is over without a commit."""


class Handoffs:
    """The sender and the receiver of one worker. A hand-off between two workers has one end on
    each; a worker may send one hand-off to a peer and receive another from it at the same time."""

    def __init__(self, context: EndpointContext, listener: HandoffListener) -> None:
        self.sender = Sender(context, listener)
        self.receiver = Receiver(context, listener)

    async def start(self) -> None:
        """Make every rank listen for links. Raises HandoffFailed when one cannot."""
        await self.receiver.start()

    def handlers(self) -> dict[Method[Any, Any], Handler]:
        """What other workers may call."""
        return {
            **self.sender.handlers(),
            **self.receiver.handlers(),
            methods.END: self._on_end,
        }

    def counters(self) -> Mapping[str, int]:
        """Totals of both ends (TransferStats)."""
        total: Counter[str] = Counter()
        for end in (self.sender, self.receiver):
            total.update(end.stats.counters())
        return total

    async def peer_lost(self, epoch: int) -> None:
        """The worker of this epoch is gone: end the hand-offs with it, close its channels."""
        await asyncio.gather(self.sender.peer_lost(epoch), self.receiver.peer_lost(epoch))

    async def close(self) -> None:
        """End everything, tell the peers if they listen, and stop."""
        await asyncio.gather(self.sender.close(), self.receiver.close())

    async def _on_end(self, end: HandoffEnd) -> Ack:
        return await (self.sender if end.to_sender else self.receiver).on_end(end)
