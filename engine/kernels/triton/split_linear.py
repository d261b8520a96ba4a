"""Typed wrapper of the linear kernel for some dozens of rows, and its measured launch shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.runtime import driver

from engine.kernels.activation import Activation
from engine.kernels.jit.split_linear import split_linear as kernel
from engine.kernels.triton.elementwise import launch_options

#: Columns of each row of the weights that are prefetched while the kernel before still runs.
_PREFETCH_COLUMNS = 256
#: Rows of one launch.
MAX_ROWS = 128
#: Outputs of a tile (for GATED, of each half) and the columns of its weights in one stage, for up
#: to 64 rows and above.
_FEW, _MANY = (64, 128), (128, 64)
#: Shared memory that a launch may use for its stages, and the stages that were ever worth it,
#: without and with a gate.
_STAGE_BYTES, _MAX_STAGES = 208 << 10, (6, 4)
#: What the largest launch takes where it takes least, on an A100. Many other cards have 99 KiB.
_LEAST_SHARED = 160 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitShape:
    """How one launch is cut: a tile of outputs (for GATED, of each half), how many programs share
    it, pipeline stages, warps."""

    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int


def split_shape(rows: int, n: int, k: int, gated: bool) -> SplitShape | None:
    """How to launch a product of so many rows; None when the kernel cannot do it.

    One program a multiprocessor or more, as many stages as fit: within 1 % of the best of those
    tried in steps of an 8B model on an H200 (benchmarks/results/engine).
    """
    block_n, block_k = _FEW if rows <= 64 else _MANY
    if rows > MAX_ROWS or n % block_n or k % block_k:
        return None
    tiles = n // block_n
    stage = (block_n * (1 + gated) + block_rows(rows)) * block_k * 2
    return SplitShape(
        block_n=block_n,
        block_k=block_k,
        splits=max(1, min(132 // tiles, k // block_k // 4)),
        stages=min(_MAX_STAGES[gated], _STAGE_BYTES // stage),
        warps=4 if rows <= 64 else 8,
    )


def fits(device: torch.device) -> bool:
    """Whether the device has the shared memory that launches are cut for."""
    if device.type != "cuda":
        return True
    properties = driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"]) >= _LEAST_SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class NextInput:
    """What a product leaves for the one after the norm that follows it.

    gain: the norm's; x: `[m, n]`, its input times gain; squares: float32 `[tiles, MAX_ROWS]`, the
    sums of squares of its input over each tile, tiles = n / block_n.
    """

    gain: torch.Tensor
    x: torch.Tensor
    squares: torch.Tensor


class SplitScratch:
    """Where programs that share a tile leave their parts; one launch at a time uses it."""

    def __init__(self, device: torch.device, num_tiles: int, num_floats: int) -> None:
        self.arrived = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        self.parts = torch.empty(num_floats, dtype=torch.float32, device=device)


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
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    following: NextInput | None = None,
    gated: bool = False,
    activation: Activation = Activation.SILU,
    pdl: bool = False,
) -> None:
    """out `[m, n]` = f(x weight^T + bias) + residual for up to MAX_ROWS rows m of half precision.

    weight: `[n, k]`, or `[2 n, k]` when gated (gate rows first; f = act(gate) * up; no bias then);
    n and k are multiples of the shape's tile. `residual` may be `out` itself. With the `squares` of
    the product that has left x, x stands for the RMS norm it is the input of.
    """
    rows, k = x.shape
    n = out.shape[1]
    kernel[(n // shape.block_n, shape.splits)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        scratch.parts if squares is None else squares,
        out,
        x if following is None else following.gain,
        x if following is None else following.x,
        scratch.parts if following is None else following.squares,
        scratch.parts,
        scratch.arrived,
        eps,
        rows,
        n,
        k,
        0 if squares is None else squares.shape[0],
        -(-_PREFETCH_COLUMNS // shape.block_k),
        BLOCK_M=block_rows(rows),
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        SHARE=shape.splits > 1,
        STAGES=shape.stages,
        SQUARES_P=0 if squares is None else triton.next_power_of_2(squares.shape[0]),
        STRIDE=MAX_ROWS,
        GATED=gated,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        NEXT=following is not None,
        GELU=activation is Activation.GELU_TANH,
        PDL=pdl,
        num_warps=shape.warps,
        **launch_options(pdl),
    )
