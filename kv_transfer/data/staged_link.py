"""Moves blocks over a link that carries bytes, through a staging buffer."""

from __future__ import annotations

import math

import torch

from kv_transfer.backends.base import BlockMove, BlockStore, End, Link, LinkMode
from kv_transfer.plan.checksum import content_checksum


class StagedLink:
    """A BlockLink over a Link: gathers a message out of the pool and sends it, or receives it and
    scatters it into the pool."""

    mode = LinkMode.BLOCKING

    def __init__(self, link: Link, store: BlockStore) -> None:
        self._link = link
        self._store = store
        self._staging = torch.empty(0, dtype=torch.uint8, device=store.device)

    def send_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """A revoked or discarded message is sent all the same, with whatever the staging buffer
        holds: the receiver has posted for it, and skipping it would set the two out of step."""
        layers, heads, staging, rows = self._slice(move)
        marks = self._store.step_events
        if move.after and marks is not None:  # rank 0 has waited for its own step; wait for ours
            marks.wait(move.after, layers[-1])
        with torch.inference_mode(), move.access.entered() as allowed:
            if allowed and not move.discard:
                self._store.gather(move.cells, layers, heads, out=rows)
        checksum = content_checksum(staging, move.checksum, move.place)
        self._link.send(staging, timeout_s)
        return lambda: checksum

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """A revoked message is received all the same, and dropped."""
        layers, heads, staging, rows = self._slice(move)
        self._link.recv(staging, timeout_s)
        checksum = content_checksum(staging, move.checksum, move.place)
        with torch.inference_mode(), move.access.entered() as allowed:
            if allowed:
                self._store.scatter(move.cells, layers, heads, rows)
        return lambda: checksum

    def close(self) -> None:
        self._link.close()

    def _slice(self, move: BlockMove) -> tuple[range, range, torch.Tensor, torch.Tensor]:
        """Layers and heads of a move, the staging buffer as bytes and shaped as the pool's rows."""
        store, cells = self._store, move.cells
        layers = range(move.first_layer, move.first_layer + move.num_layers)
        heads = range(move.first_head, move.first_head + move.num_heads)
        shape = (len(layers), cells.count, 2, len(heads), cells.size, store.head_dim)
        num_bytes = math.prod(shape) * store.dtype.itemsize
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=store.device)
        staging = self._staging[:num_bytes]
        return layers, heads, staging, staging.view(store.dtype).view(shape)
