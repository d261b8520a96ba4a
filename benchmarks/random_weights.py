"""Weights for machines without the real ones."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.sharding import Span


class RandomSource:
    """Weights made on the device: normal, scaled so that activations keep their size."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """A slice of the given extent; norm weights are near one."""
        size = list(shape)
        if rows is not None:
            size[0] = rows[1] - rows[0]
        if columns is not None:
            size[1] = columns[1] - columns[0]
        out = torch.empty(size, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return out.uniform_(0.9, 1.1, generator=self._generator)
        return out.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)
