"""Typed wrapper of the linear kernel for some dozens of rows, and its measured launch shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.jit.split_linear import split_linear as kernel
from engine.kernels.triton_elementwise import launch_options

#: Columns of each row of the weights that are asked for while the kernel before still runs.
_PREFETCH_COLUMNS = 256
#: Rows of one launch; fewer were not measured.
MIN_ROWS, MAX_ROWS = 17, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitShape:
    """How one launch is cut: a tile of outputs (for GATED, of each half), how many programs share
    it, pipeline stages, warps."""

    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int


#: (n, k, gated) -> the shapes for up to 32 and up to 64 rows that beat cuBLAS on an H200
#: (benchmarks.linear_shapes); None where none did, and other products were not measured.
MEASURED: dict[tuple[int, int, bool], tuple[SplitShape | None, SplitShape | None]] = {
    (4096, 4096, False): (
        SplitShape(block_n=64, block_k=256, splits=2, stages=4, warps=4),
        None,
    ),
    (14336, 4096, True): (
        SplitShape(block_n=64, block_k=128, splits=1, stages=4, warps=4),
        SplitShape(block_n=64, block_k=128, splits=1, stages=4, warps=4),
    ),
    (4096, 14336, False): (
        SplitShape(block_n=64, block_k=256, splits=2, stages=4, warps=4),
        SplitShape(block_n=64, block_k=128, splits=2, stages=6, warps=4),
    ),
    (128256, 4096, False): (
        SplitShape(block_n=64, block_k=128, splits=1, stages=3, warps=4),
        SplitShape(block_n=128, block_k=64, splits=1, stages=4, warps=4),
    ),
}


def measured_shape(rows: int, n: int, k: int, gated: bool) -> SplitShape | None:
    """How to launch a product of so many rows; None when cuBLAS is to do it."""
    if not MIN_ROWS <= rows <= MAX_ROWS:
        return None
    few, many = MEASURED.get((n, k, gated), (None, None))
    return few if block_rows(rows) <= 32 else many


class SplitScratch:
    """Where programs that share a tile leave their parts; one launch at a time uses it."""

    def __init__(self, device: torch.device, num_tiles: int, num_floats: int) -> None:
        self.arrived = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        self.parts = torch.empty(num_floats, dtype=torch.float32, device=device)

    @staticmethod
    def for_measured(device: torch.device) -> SplitScratch:
        """Enough for every measured shape."""
        sizes = [
            scratch_sizes(rows, n, gated, shape)
            for (n, _, gated), shapes in MEASURED.items()
            for rows, shape in zip((32, MAX_ROWS), shapes, strict=True)
            if shape is not None
        ]
        tiles, floats = zip(*sizes, strict=True)
        return SplitScratch(device, max(tiles), max(floats))


def block_rows(rows: int) -> int:
    """Rows of x that a launch computes."""
    return max(16, 1 << (rows - 1).bit_length())


def scratch_sizes(rows: int, n: int, gated: bool, shape: SplitShape) -> tuple[int, int]:
    """(tiles, floats) of scratch that a launch needs."""
    if shape.splits == 1:
        return 0, 0
    tiles = n // shape.block_n
    return tiles, tiles * shape.block_n * block_rows(rows) * shape.splits * (1 + gated)


def split_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scratch: SplitScratch,
    shape: SplitShape,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """out `[m, n]` = f(x weight^T + bias) + residual for up to MAX_ROWS rows m of half precision.

    weight: `[n, k]`, or `[2 n, k]` when gated (gate rows first; f = silu(gate) * up; no bias then);
    n and k are multiples of the shape's tile. `residual` may be `out` itself.
    """
    rows, k = x.shape
    n = out.shape[1]
    kernel[(n // shape.block_n, shape.splits)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        scratch.parts,
        scratch.arrived,
        rows,
        n,
        k,
        BLOCK_M=block_rows(rows),
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        SHARE=shape.splits > 1,
        STAGES=shape.stages,
        GATED=gated,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        PDL=pdl,
        PREFETCH=max(1, _PREFETCH_COLUMNS // shape.block_k) if pdl else 0,
        num_warps=shape.warps,
        **launch_options(pdl),
    )
