"""Which of NVIDIA's libraries multiplies in a step: cuBLAS, or cuBLASLt where its choice of kernels
is faster."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.cuda.options import StepShape

#: Rows of a step for which cuBLAS chooses slower kernels, mostly products that it splits over their
#: inputs: 8B on an H200, microseconds a layer by cuBLAS and cuBLASLt: 127 and 123, 132 and 123, 198
#: and 194, 345 and 333. With 128, 256 or 512 rows they differ by 1 % (docs/adr/0093).
_LT_ROWS = frozenset({80, 96, 272, 528})


def with_faster_library(
    run: Callable[[StepShape], Tensor], device: torch.device
) -> Callable[[StepShape], Tensor]:
    """`run`, whose products come from the library that is faster for the rows of its step."""

    def running(shape: StepShape) -> Tensor:
        if device.type != "cuda" or shape.rows not in _LT_ROWS:
            return run(shape)
        with _cublaslt():
            return run(shape)

    return running


@contextmanager
def _cublaslt() -> Iterator[None]:
    library = torch.backends.cuda.preferred_blas_library
    before = library()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*preferred_blas_library")
        library("cublaslt")
    try:
        yield
    finally:
        library(before)
