"""The ranks of an engine under measurement, one process each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.cuda.group import DeviceGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among the ranks of one engine; all of them run the same benchmark."""

    rank: int
    size: int
    store: Any

    def smallest(self, key: str, value: int) -> int:
        """The smallest of all ranks' values."""
        if self.size == 1:
            return value
        self.store.set(f"{key}/{self.rank}", str(value))
        return min(int(self.store.get(f"{key}/{rank}")) for rank in range(self.size))

    def meet(self, key: str) -> None:
        """Wait until all ranks have come here."""
        self.smallest(key, 0)

    def join(self, device: torch.device) -> DeviceGroup | None:
        """The group of all ranks' GPUs."""
        if self.size == 1:
            return None
        return DeviceGroup(self.store, self.rank, self.size, device, name="benchmark")
