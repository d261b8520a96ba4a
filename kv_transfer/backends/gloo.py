"""Links over TCP between CPU tensors: a two-party ProcessGroupGloo each, without a global group.

Gloo breaks all of a group's connections as soon as one operation times out, which is what a link
wants: every failure is final for this incarnation.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Protocol, cast
from zlib import crc32

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Work

from kv_transfer.backends.base import LinkBroken, LinkId
from kv_transfer.backends.rendezvous import RendezvousBackend, SocketStore

_POISON_TAG = (1 << 31) - 1


class _Group(Protocol):
    """What a link needs of ProcessGroupGloo; torch's stubs leave it out."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...


class GlooLink:
    """One end of a two-party group. Tags tell the message's number and size: ends out of step fail,
    never mix. Gloo would end the process when a message is longer than what waits for it."""

    def __init__(self, link: LinkId, group: _Group, me: int) -> None:
        self._name = str(link)
        self._group: _Group | None = group
        self._me = me
        self._count = 0
        self._lock = threading.Lock()

    def send(self, data: torch.Tensor, timeout_s: float) -> None:
        """Blocks until gloo has taken all of `data`; the peer may not have it yet."""
        self._move("send", data, timeout_s)

    def recv(self, data: torch.Tensor, timeout_s: float) -> None:
        """Blocks until all of `data` is there."""
        self._move("recv", data, timeout_s)

    def _move(self, what: str, data: torch.Tensor, timeout_s: float) -> None:
        group = self._group
        if group is None:
            raise LinkBroken(f"link {self._name} is closed")
        tag = crc32(b"%d %d" % (self._count, data.numel())) % _POISON_TAG
        self._count += 1
        try:
            post = group.send if what == "send" else group.recv
            post([data], 1 - self._me, tag).wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self.close()
            raise LinkBroken(f"link {self._name}: {what}: {_first_line(error)}") from error

    def close(self) -> None:
        """Close the connection. A wait in another thread cannot be interrupted as such, but gloo
        fails every pending operation of a group when one of them times out: so one is made to."""
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        try:
            never = torch.empty(1, dtype=torch.uint8)
            group.recv([never], 1 - self._me, _POISON_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # as intended, or broken before


class GlooBackend(RendezvousBackend[GlooLink]):
    """Makes gloo links for one rank."""

    name = "gloo"

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def _build(self, link: LinkId, connection: socket.socket, me: int, limit: float) -> GlooLink:
        # Private, but the only way to choose the interface; the contract suite checks it.
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._devices = [self._device]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        options._timeout = timedelta(seconds=max(0.001, limit - time.monotonic()))  # noqa: SLF001
        with connection:
            try:
                store = SocketStore(connection, limit)
                group = ProcessGroupGloo(store, me, 2, options)
            except (OSError, RuntimeError, ValueError) as error:
                raise LinkBroken(f"link {link}: {_first_line(error)}") from error
        return GlooLink(link, cast(_Group, group), me)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
