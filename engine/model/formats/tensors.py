"""Tensors of one quantised module, in the types that the checkpoint stores."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ModelRefused
from engine.model.checkpoint import Checkpoint
from engine.model.sharding import Span


class ModuleTensors:
    """Tensors of module `name`; every fault is a ModelRefused naming tensor and file."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self.name = name

    def kind(self, tensor: str) -> str | None:
        """The safetensors type of a tensor, None where it does not exist."""
        stated = self._checkpoint.header(f"{self.name}.{tensor}")
        return None if stated is None else stated[0]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor that must exist."""
        stated = self._checkpoint.header(f"{self.name}.{tensor}")
        if stated is None:
            raise self._missing(tensor)
        return stated[1]

    def read(
        self,
        tensor: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """A slice of a tensor whose whole shape must be `shape`."""
        found = self.shape(tensor)
        if found != shape:
            raise self.fault(tensor, f"has shape {list(found)}, expected {list(shape)}")
        return self._checkpoint.stored(f"{self.name}.{tensor}", rows, columns)

    def scales(
        self,
        tensor: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """A slice of scales, which must be finite and not negative."""
        scales = self.read(tensor, shape, rows, columns)
        if not scales.is_floating_point():
            raise self.fault(tensor, f"is {self.kind(tensor)}, expected floating-point scales")
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise self.fault(tensor, "has scales that are negative or not finite: it is damaged")
        return scales.float() if scales.dtype is torch.float64 else scales

    def fault(self, tensor: str, why: str) -> ModelRefused:
        """The error of a tensor that is wrong."""
        name = f"{self.name}.{tensor}"
        return ModelRefused(f"{self._checkpoint.place(name)}: tensor {name} {why}", param=name)

    def _missing(self, tensor: str) -> ModelRefused:
        """That of a tensor that is not there, with the file that has its neighbours."""
        name = f"{self.name}.{tensor}"
        place = self._checkpoint.place(self.name)
        return ModelRefused(f"{place}: tensor {name} is missing", param=name)
