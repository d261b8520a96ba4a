"""Matrices of a quantised checkpoint, each in the form that its tensors have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.formats.packed import PackedModule
from engine.model.formats.scaled import read_scaled
from engine.model.formats.stated import CheckpointFormat
from engine.model.formats.tensors import ModuleTensors
from engine.model.sharding import Span
from engine.quantization.weight import Weight

_FLOATING = {"F8_E4M3": True, "I8": False}


@dataclass(frozen=True, slots=True)
class QuantizedMatrices:
    """Reads slices. A module whose `weight` is an ordinary tensor is not quantised, whatever the
    lists of config.json say: they and the tensors agree in every checkpoint that loads elsewhere.
    """

    checkpoint: Checkpoint
    format: CheckpointFormat
    dtype: torch.dtype

    def read(
        self,
        name: str,
        shape: tuple[int, int],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Weight:
        """Rows or columns of the matrix of module `name`, whose whole shape must be `shape`."""
        tensors, kind = ModuleTensors(self.checkpoint, name), self.format.of(name)
        stored = tensors.kind("weight")
        spans = rows or (0, shape[0]), columns or (0, shape[1])
        if stored in _FLOATING:
            if kind.floating is not _FLOATING[stored] or kind.bits != 8:
                raise tensors.fault(
                    "weight", f"is {stored}, but config.json states {kind.describe()}"
                )
            return read_scaled(tensors, kind, shape, *spans, self.dtype)
        if tensors.kind("weight_packed") or tensors.kind("qweight"):
            module = PackedModule(
                tensors=tensors,
                kind=kind,
                shape=shape,
                rows=spans[0],
                columns=spans[1],
                dtype=self.dtype,
            )
            return module.read(self.format.method)
        return self.checkpoint.read(f"{name}.weight", shape, rows=rows, columns=columns)

    def tied_head(self, embedding: Tensor) -> Tensor:
        return embedding
