"""Links between CPU tensors: message bytes over one authenticated TCP connection per link."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from framing.channel import Channel, ChannelClosed
from kv_transfer.backends.base import LinkBroken, LinkId
from kv_transfer.backends.rendezvous import RendezvousBackend


class TcpLink:
    """One end. The size of each message is sealed and compared with the receiver's, so ends out of
    step fail; checksums at commit prove the content."""

    def __init__(self, link: LinkId, channel: Channel) -> None:
        self._name = str(link)
        self._channel = channel

    def send(self, data: torch.Tensor, timeout_s: float) -> None:
        """Blocks until the system has taken all of `data`; the peer may not have it yet."""
        self._move("send", self._channel.send_bulk, data, timeout_s)

    def recv(self, data: torch.Tensor, timeout_s: float) -> None:
        self._move("recv", self._channel.receive_bulk, data, timeout_s)

    def _move(
        self,
        what: str,
        move: Callable[[memoryview, float], None],
        data: torch.Tensor,
        timeout_s: float,
    ) -> None:
        try:
            move(data.numpy().data, time.monotonic() + timeout_s)
        except ChannelClosed as error:
            raise LinkBroken(f"link {self._name}: {what}: {error}") from error

    def close(self) -> None:
        """Close the connection. Wakes blocked calls of both ends."""
        self._channel.close()


class TcpBackend(RendezvousBackend[TcpLink]):
    """Makes TCP links for one rank."""

    name = "tcp"

    def _build(self, link: LinkId, channel: Channel, *, is_sender: bool, limit: float) -> TcpLink:
        return TcpLink(link, channel)
