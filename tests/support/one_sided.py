"""The one-sided hand-off without a GPU: senders write into the receiver's pool as over CUDA IPC."""

from __future__ import annotations

from typing import Any

import torch

from kv_transfer.backends.base import BlockMove, End, LinkBroken, LinkId, LinkMode
from kv_transfer.backends.host import host_id
from kv_transfer.plan.checksum import content_checksum


class OneSidedHub:
    """Pools by number; an endpoint names one."""

    def __init__(self) -> None:
        self.pools: list[Any] = []
        self.closed: set[int] = set()


class OneSidedBackend:
    """One rank. Bind its pool with `bind_store` first."""

    name = "cuda_ipc"

    def __init__(self, hub: OneSidedHub) -> None:
        self.hub = hub
        self.pool: Any = None
        self.number = -1

    def bind_store(self, pool: Any) -> None:
        self.pool = pool
        self.number = len(self.hub.pools)
        self.hub.pools.append(pool)

    def listen(self) -> str:
        return f"{host_id()}|{self.number}"

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> OneSidedLink:
        number = int(endpoint.partition("|")[2])
        if number in self.hub.closed:
            raise LinkBroken("the peer's pool cannot be mapped", param="backend")
        return OneSidedLink(self, self.hub.pools[number])

    def accept(self, link: LinkId, timeout_s: float) -> OneSidedLink:
        return OneSidedLink(self, None)

    def close(self) -> None:
        self.hub.closed.add(self.number)


class OneSidedLink:
    mode = LinkMode.UNORDERED

    def __init__(self, backend: OneSidedBackend, target: Any) -> None:
        self._pool = backend.pool
        self._target = target
        self._closed = False

    def send_blocks(self, move: BlockMove, timeout_s: float) -> End:
        if self._closed:
            raise LinkBroken("closed")
        return lambda: self._send(move)

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> End:
        return lambda: self._recv(move)

    def _send(self, move: BlockMove) -> int:
        layers = range(move.first_layer, move.first_layer + move.num_layers)
        heads = range(move.first_head, move.first_head + move.num_heads)
        there = range(move.peer_first_head, move.peer_first_head + move.num_heads)
        with move.access.entered() as allowed:
            if not allowed or move.discard:
                return 0
            if move.after:
                self._pool.step_events.wait(move.after, layers[-1])
            data = self._pool.gather(move.cells, layers, heads)
            self._target.scatter(move.peer_cells, layers, there, data)
            return _sum(data, move)

    def _recv(self, move: BlockMove) -> int:
        layers = range(move.first_layer, move.first_layer + move.num_layers)
        heads = range(move.first_head, move.first_head + move.num_heads)
        with move.access.entered() as allowed:
            return _sum(self._pool.gather(move.cells, layers, heads), move) if allowed else 0

    def close(self) -> None:
        self._closed = True


def _sum(data: Any, move: BlockMove) -> int:
    return content_checksum(data.contiguous().view(-1).view(torch.uint8), move.checksum)
