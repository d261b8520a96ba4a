"""Readers of the matrices of a checkpoint, as they are or quantised."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.config import Quantization
from engine.errors import ModelRefused
from engine.model.checkpoint import HEAD, Checkpoint
from engine.model.config import ModelConfig
from engine.model.formats.reader import QuantizedMatrices
from engine.model.sharding import Span
from engine.quantization.at_load import quantise
from engine.quantization.weight import Weight

#: The module of the output head.
HEAD_MODULE = HEAD.removesuffix(".weight")


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


class MatrixReader(Protocol):
    """The matrices of products, by the names that their modules have."""

    def read(
        self,
        name: str,
        shape: tuple[int, int],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Weight:
        """Rows or columns of the matrix of module `name`, whose whole shape must be `shape`."""

    def tied_head(self, embedding: Tensor) -> Weight:
        """The output head of a model whose embedding is the head."""


class PlainMatrices:
    """Matrices that are not quantised."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def read(
        self,
        name: str,
        shape: tuple[int, int],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        return self._source.read(f"{name}.weight", shape, rows=rows, columns=columns)

    def tied_head(self, embedding: Tensor) -> Tensor:
        return embedding


class QuantisingMatrices:
    """Matrices of an unquantised checkpoint, quantised as they are read. Each rank reads whole
    rows, which scales belong to. head: what the output head becomes; None: it stays."""

    def __init__(self, source: WeightSource, kind: Quantization, head: Quantization | None) -> None:
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
        matrix = self._source.read(f"{name}.weight", shape, rows=rows)
        if name == HEAD_MODULE:
            return self.tied_head(matrix)
        return quantise(matrix, self._kind, columns)

    def tied_head(self, embedding: Tensor) -> Weight:
        return embedding if self._head is None else quantise(embedding, self._head)


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
        if quantization is None:
            return PlainMatrices(source)
        return QuantisingMatrices(source, Quantization(quantization), head)
    if quantization is not None:
        raise ModelRefused(
            f"quantization {quantization!r}: the checkpoint is quantised already "
            f"({model.quantization.describe()})",
            param="quantization",
        )
    assert isinstance(source, Checkpoint)
    return QuantizedMatrices(source, model.quantization, dtype)
