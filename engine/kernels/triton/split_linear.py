"""Typed wrapper of the linear kernel for some dozens of rows, and its measured launch shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels.activation import Activation
from engine.kernels.jit.split_linear import split_linear as kernel
from engine.kernels.triton.coded import CODE_GROUP, SCALE_ROWS, CodedRows, CodedWeight
from engine.kernels.triton.elementwise import launch_options
from engine.kernels.triton.launch import power_of_2

#: Bytes of each row of the weights that are prefetched while the kernel before still runs, of
#: numbers and of codes: more of these delays that kernel.
_PREFETCH_BYTES = 512, 128
#: Parts of a tile are awaited up to so many bytes: they are read again until all have come.
_AWAITED_BYTES = 14 << 10
#: Rows of one launch.
MAX_ROWS = SCALE_ROWS
#: Outputs of a tile (for GATED, of each half) and the columns of its weights in one stage, for up
#: to 64 rows and above.
_FEW, _MANY = (64, 128), (128, 64)
#: Shared memory that a launch may use for its stages, and the stages that were ever worth it,
#: without and with a gate.
_STAGE_BYTES, _MAX_STAGES = 208 << 10, (6, 4)
#: The same for codes, and what two programs that share a multiprocessor may use together.
_CODE_STAGE_BYTES = 220 << 10
#: Programs that share a tile; the last adds all parts in unrolled code.
_MAX_SPLITS = 16
#: What the largest launch takes where it takes least, on an A100. Many other cards have 99 KiB.
_LEAST_SHARED = 160 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitShape:
    """How one launch is cut: a tile of outputs (for GATED, of each half), how many programs share
    it, pipeline stages, warps; rows of x, where not the next power of two from 16 on; tiles of
    block_k columns in one stage."""

    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int
    block_m: int | None = None
    unroll: int = 1


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
        splits=max(1, min(132 // tiles, k // block_k // 4, _MAX_SPLITS)),
        stages=min(_MAX_STAGES[gated], _STAGE_BYTES // stage),
        warps=4 if rows <= 64 else 8,
    )


def shape_for(
    rows: int, weight: torch.Tensor | CodedWeight, *, gated: bool = False
) -> SplitShape | None:
    """How to launch a product with these weights; None when the kernel cannot do it."""
    n, k = weight.shape[0] // (1 + gated), weight.shape[1]
    if isinstance(weight, torch.Tensor):
        return split_shape(rows, n, k, gated)
    if rows > MAX_ROWS:
        return None
    if weight.codes.dtype is torch.int8:
        return _byte_shape(rows, n, k, gated)
    return _pair_shape(rows, n, weight, gated) if weight.paired else _code_shape(rows, n, k, gated)


def _code_shape(rows: int, n: int, k: int, gated: bool) -> SplitShape | None:
    """As `split_shape`, for e4m3 codes times e4m3 codes: tiles as wide as a scale of inputs, and
    two programs a multiprocessor where both have room for all stages."""
    if n % CODE_GROUP or k % CODE_GROUP:
        return None
    tiles = n // CODE_GROUP
    stage = (CODE_GROUP * (1 + gated) + block_rows(rows)) * CODE_GROUP
    stages = _MAX_STAGES[gated]
    programs = 132 if gated or 2 * stages * stage > _CODE_STAGE_BYTES else 264
    return SplitShape(
        block_n=CODE_GROUP,
        block_k=CODE_GROUP,
        splits=max(1, min(programs // tiles, k // CODE_GROUP // 4, _MAX_SPLITS)),
        stages=min(stages, _CODE_STAGE_BYTES // stage),
        warps=4 if rows <= 32 else 8,
    )


def _byte_shape(rows: int, n: int, k: int, gated: bool) -> SplitShape | None:
    """For signed bytes, which become numbers in registers: programs of two warps keep these
    there."""
    if gated or rows > 32 or n % 64 or k % CODE_GROUP:
        return None
    splits = max(1, min(264 // (n // 64), k // CODE_GROUP // 4, _MAX_SPLITS))
    return SplitShape(block_n=64, block_k=CODE_GROUP, splits=splits, stages=5, warps=2)


def _pair_shape(rows: int, n: int, weight: CodedWeight, gated: bool) -> SplitShape | None:
    """For pairs: of few rows many small programs, so that some wait for memory while others make
    numbers."""
    group, width = weight.group, weight.codes.shape[1]
    block_n, warps, programs, unroll = 128, 8, 132, 1
    if rows <= 16:
        block_n, warps = 64, 2
        wide = width % 128 == 0 and (rows <= 8 or not gated)
        unroll = 128 // group if wide else 1
        programs = 264 if gated and wide else 528
    if n % block_n:
        return None
    tiles, steps = n // block_n, width // (group * unroll)
    block_m = 8 if rows <= 8 else block_rows(rows)
    stage = (block_n * (1 + gated) + block_m * 4) * group * unroll
    splits = max(1, min(programs // tiles, steps // 2, _MAX_SPLITS))
    splits = -(-steps // -(-steps // splits))  # each has columns
    resident = min(4, -(-tiles * splits // 132))
    return SplitShape(
        block_n=block_n,
        block_k=group,
        splits=splits,
        stages=max(2, min(5, _STAGE_BYTES // resident // stage)),
        warps=warps,
        block_m=block_m,
        unroll=unroll,
    )


def fits(device: torch.device) -> bool:
    """Whether the device has the shared memory that launches are cut for."""
    if device.type != "cuda":
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"]) >= _LEAST_SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class NextInput:
    """What a product leaves for the one after the norm that follows it.

    gain: the norm's; x: `[m, n]`, its input times gain; squares: float32 `[tiles, MAX_ROWS]`, the
    sums of squares of its input over each tile, tiles = n / block_n. Where x is codes, block_n is
    their group.
    """

    gain: torch.Tensor
    x: torch.Tensor | CodedRows
    squares: torch.Tensor


class SplitScratch:
    """Where programs that share a tile leave their parts, of launches that count them and of those
    that await them; one launch at a time uses it."""

    def __init__(self, device: torch.device, num_tiles: int, num_floats: int) -> None:
        self.arrived = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        self.parts = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.awaited = torch.empty_like(self.parts)
        self.awaited.view(torch.int32).fill_(-1)


def block_rows(rows: int) -> int:
    """Rows of x that a launch computes."""
    return max(16, power_of_2(rows))


def scratch_sizes(rows: int, n: int, gated: bool, shape: SplitShape) -> tuple[int, int]:
    """(tiles, floats) of scratch that a launch needs."""
    if shape.splits == 1:
        return 0, 0
    tiles, block_m = n // shape.block_n, shape.block_m or block_rows(rows)
    return tiles, tiles * shape.block_n * block_m * shape.splits * (1 + gated)


def scratch_for(
    device: torch.device, max_rows: int, products: Iterable[tuple[torch.Tensor | CodedWeight, bool]]
) -> SplitScratch:
    """Scratch for products of up to `max_rows` rows with these weights, each with whether it is
    gated; of those that the kernel can do."""
    sizes = [(0, 0)]
    row_blocks = {min(max_rows, 1 << power) for power in range(max_rows.bit_length() + 1)}
    for weight, gated in products:
        for rows in row_blocks:
            shape = shape_for(rows, weight, gated=gated)
            if shape is not None:
                sizes.append(scratch_sizes(rows, weight.shape[0] // (1 + gated), gated, shape))
    tiles, floats = zip(*sizes, strict=True)
    return SplitScratch(device, max(tiles), max(floats))


def split_linear(
    x: torch.Tensor | CodedRows,
    weight: torch.Tensor | CodedWeight,
    scratch: SplitScratch,
    shape: SplitShape,
    *,
    out: torch.Tensor | CodedRows,
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
    the product that left x, x stands for the RMS norm it is the input of. Codes of x and out have
    scales for groups of the shape's block_k and block_n, of the weights for outputs or block_k.
    """
    rows, n = x.shape[0], out.shape[1]
    numbers, codes = _forms(weight)
    inputs, input_scales = _parts(x)
    cut = _cut(shape, rows, gated)
    kernel[(n // shape.block_n, shape.splits)](
        inputs,
        input_scales,
        numbers,
        scratch.parts if codes is None else codes.scales,
        inputs if bias is None else bias,
        inputs if residual is None else residual,
        scratch.parts if squares is None else squares,
        *_parts(out),
        inputs if following is None else following.gain,
        *_parts(x if following is None else following.x),
        scratch.parts if following is None else following.squares,
        scratch.awaited if cut["AWAIT"] else scratch.parts,
        scratch.arrived,
        eps,
        1.0 if codes is None else codes.unit,
        rows,
        n,
        numbers.shape[1],
        0 if squares is None else squares.shape[0],
        -(-_PREFETCH_BYTES[codes is not None] // (shape.block_k * numbers.itemsize)),
        SQUARES_P=0 if squares is None else power_of_2(squares.shape[0]),
        STRIDE=MAX_ROWS,
        GATED=gated,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        NEXT=following is not None,
        GELU=activation is Activation.GELU_TANH,
        PDL=pdl,
        **cut,
        **_form(x, codes),
        **launch_options(pdl),
    )


def _cut(shape: SplitShape, rows: int, gated: bool) -> dict[str, int]:
    """The kernel's constants of a launch shape, and the warps."""
    block_m = shape.block_m or block_rows(rows)
    part = shape.block_n * block_m * (1 + gated) * 4
    return {
        "AWAIT": 0 < (shape.splits - 1) * part <= _AWAITED_BYTES,
        "BLOCK_M": block_m,
        "BLOCK_N": shape.block_n,
        "BLOCK_K": shape.block_k,
        "UNROLL": shape.unroll,
        "SPLITS": shape.splits,
        "STAGES": shape.stages,
        "num_warps": shape.warps,
    }


def _form(x: torch.Tensor | CodedRows, codes: CodedWeight | None) -> dict[str, bool]:
    """The kernel's constants of forms of inputs and weights."""
    numbers = None if isinstance(x, CodedRows) else x
    return {
        "CODED": numbers is None,
        "FAST": isinstance(kernel, JITFunction)
        and numbers is not None
        and numbers.dtype is torch.bfloat16,
        "SCALED": codes is not None,
        "GROUPED": codes is not None and codes.scales.shape[0] > 1,
        "PAIRED": codes is not None and codes.paired,
    }


def _forms(
    weight: torch.Tensor | CodedWeight,
) -> tuple[torch.Tensor, CodedWeight | None]:
    """The matrix that the kernel reads, and how, if it is not of numbers."""
    return (weight.codes, weight) if isinstance(weight, CodedWeight) else (weight, None)


def _parts(x: torch.Tensor | CodedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix, and the scales of codes (or anything)."""
    return (x.codes, x.scales) if isinstance(x, CodedRows) else (x, x)
