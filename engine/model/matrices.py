"""Readers of the matrices of a checkpoint, as they are or quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.config import Quantization
from engine.errors import ModelRefused
from engine.model.checkpoint import HEAD, Checkpoint
from engine.model.config import ModelConfig
from engine.model.formats.packed import PackedModule
from engine.model.formats.scaled import read_scaled
from engine.model.formats.stated import CheckpointFormat
from engine.model.formats.tensors import ModuleTensors
from engine.model.sharding import Span
from engine.quantization.at_load import quantise
from engine.quantization.weight import Weight

#: The module of the output head.
HEAD_MODULE = HEAD.removesuffix(".weight")
#: Types of codes that fill an element each, and whether they are floating-point.
_FLOATING = {"F8_E4M3": True, "I8": False}


class WeightSource(Protocol):
    """Slices of named tensors, in the dtype and on the device of the engine."""

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """The slice of tensor `name`, whose whole shape must be `shape`."""


class WholeMatrices:
    """Matrices of an unquantised checkpoint, as they are or quantised as they are read: then each
    rank reads whole rows, which scales belong to. head: what the output head becomes; None: it
    stays."""

    def __init__(
        self,
        source: WeightSource,
        kind: Quantization | None = None,
        head: Quantization | None = None,
    ) -> None:
        self._source = source
        self._kind = kind
        self._head = head

    def read(
        self,
        name: str,
        shape: tuple[int, int],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Weight:
        """Rows or columns of the matrix of module `name`, whose whole shape must be `shape`."""
        if self._kind is None:
            return self._source.read(f"{name}.weight", shape, rows=rows, columns=columns)
        matrix = self._source.read(f"{name}.weight", shape, rows=rows)
        if name == HEAD_MODULE:
            return self.tied_head(matrix)
        return quantise(matrix, self._kind, columns)

    def tied_head(self, embedding: Tensor) -> Weight:
        """The output head of a model whose embedding is the head."""
        return embedding if self._head is None else quantise(embedding, self._head)


@dataclass(frozen=True, slots=True)
class QuantizedMatrices:
    """Matrices of a quantised checkpoint, each in the form that its tensors have. A module whose
    `weight` is an ordinary tensor is not quantised, whatever the lists of config.json say: they and
    the tensors agree in every checkpoint that loads elsewhere."""

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


#: The matrices of products, by the names that their modules have.
MatrixReader = WholeMatrices | QuantizedMatrices


def matrix_reader(
    source: WeightSource,
    model: ModelConfig,
    quantization: str | None,
    dtype: torch.dtype,
    head: Quantization | None = None,
) -> MatrixReader:
    """The reader of a checkpoint that is quantised, or to be quantised like that at load (its
    output head like `head`), or neither. Raises ModelRefused for both."""
    if model.quantization is None:
        kind = None if quantization is None else Quantization(quantization)
        return WholeMatrices(source, kind, head)
    if quantization is not None:
        raise ModelRefused(
            f"quantization {quantization!r}: the checkpoint is quantised already "
            f"({model.quantization.describe()})",
            param="quantization",
        )
    assert isinstance(source, Checkpoint)
    return QuantizedMatrices(source, model.quantization, dtype)
