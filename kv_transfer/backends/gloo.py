"""Links over TCP between CPU tensors: a two-party ProcessGroupGloo per link, without a global
group.

The receiving rank owns a TCPStore on a free port (its endpoint); both ends meet there under the
link's id. Gloo breaks all of a group's connections as soon as one operation times out, which is
what a link
wants: every failure is final for this incarnation.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore, Work

from kv_transfer.backends.base import LinkBroken, LinkId

_SENDER, _RECEIVER = 0, 1
_POISON_TAG = (1 << 31) - 1
_BACKLOG = 128


class _Group(Protocol):
    """What a link needs of ProcessGroupGloo; torch's stubs leave it out."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...


class GlooLink:
    """One end of a two-party group. Tags count the messages, so ends out of step fail, never
    mix."""

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
        tag = self._count
        self._count = (self._count + 1) % _POISON_TAG
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


class GlooBackend:
    """Makes gloo links for one rank. `host` is the address of the interface to use and to
    advertise."""

    name = "gloo"

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._endpoint = ""
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def listen(self) -> str:
        """Own a store on a free port of `host` (and of no other interface)."""
        with self._lock:
            if self._store is None:
                listener = socket.socket(_family(self._host))
                listener.bind((self._host, 0))
                listener.listen(_BACKLOG)
                port = listener.getsockname()[1]
                self._store = TCPStore(
                    self._host,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
                self._endpoint = f"{self._host}|{port}"
            return self._endpoint

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> GlooLink:
        """Meet the receiver at its store."""
        return self._meet(link, endpoint, _SENDER, timeout_s)

    def accept(self, link: LinkId, timeout_s: float) -> GlooLink:
        """Meet the sender at our store, through a connection of its own: a store answers one call
        at a time, and a link that nobody joins must not hold up the others."""
        return self._meet(link, self.listen(), _RECEIVER, timeout_s)

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            self._store = None

    def _meet(self, link: LinkId, endpoint: str, me: int, timeout_s: float) -> GlooLink:
        limit = time.monotonic() + timeout_s
        host, _, port = endpoint.partition("|")
        try:
            # TCPStore retries a refused connection long and loudly; a plain probe says it at once.
            socket.create_connection((host, int(port)), timeout_s).close()
            store = TCPStore(
                host, int(port), is_master=False, timeout=_left(limit), wait_for_workers=False
            )
            group = self._group(PrefixStore(str(link), store), me, limit)
        except (OSError, ValueError, RuntimeError) as error:
            raise LinkBroken(f"link {link}: cannot connect: {_first_line(error)}") from error
        return GlooLink(link, group, me)

    def _group(self, store: PrefixStore, me: int, limit: float) -> _Group:
        # Private, but the only way to choose the interface; the contract suite checks it.
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._devices = [self._device]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        options._timeout = _left(limit)  # noqa: SLF001
        store.set_timeout(_left(limit))
        return cast(_Group, ProcessGroupGloo(store, me, 2, options))


def _left(limit: float) -> timedelta:
    return timedelta(seconds=max(0.001, limit - time.monotonic()))


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
