"""Typed wrapper of the one-row linear kernel, and its measured launch shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.runtime.jit import JITFunction

from engine.kernels.activation import Activation
from engine.kernels.jit.linear import row_linear, shared_row_linear
from engine.kernels.jit.resident import resident_linear
from engine.kernels.triton import reduce
from engine.kernels.triton.coded import CodedWeight
from engine.kernels.triton.elementwise import launch_options
from engine.kernels.triton.launch import ceil_div, power_of_2
from engine.kernels.triton.reduce import Reduction

#: Sums that one program of `shared_linear` collects.
_COLLECT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """How one launch is cut: rows of the weight and columns (of pairs, bytes) per tile, pipeline
    stages, warps; at most how many registers a thread may take, where the compiler is not to
    decide; how many tiles are asked for ahead of their turn in an unrolled loop, 0 for a loop;
    programs that keep x and go through all rows, of weights in codes, 0 for one for each tile."""

    block_n: int
    block_k: int
    stages: int
    warps: int
    registers: int | None = None
    ahead: int = 0
    programs: int = 0

    def options(self, pdl: bool) -> dict[str, int]:
        """Launch keywords."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **limit, **launch_options(pdl)}


#: (n, k, gated) -> the best launch shape within a step on an H200 (benchmarks/results/engine): of
#: the narrow shards of a 70B model, and of the sizes of Phi-4-mini and Gemma 3 12B.
_MEASURED = {
    (7168, 8192, True): LinearShape(block_n=4, block_k=1024, stages=2, warps=4),
    (8192, 7168, False): LinearShape(block_n=4, block_k=512, stages=4, warps=4),
    (2560, 8192, False): LinearShape(block_n=4, block_k=1024, stages=3, warps=4),
    (8192, 2048, False): LinearShape(block_n=8, block_k=512, stages=1, warps=4),
    (3072, 3072, False): LinearShape(block_n=4, block_k=1024, stages=1, warps=4, ahead=2),
    (5120, 3072, False): LinearShape(block_n=4, block_k=1024, stages=1, warps=4, ahead=2),
    (3072, 8192, False): LinearShape(block_n=4, block_k=1024, stages=1, warps=4),
    (8192, 3840, False): LinearShape(block_n=4, block_k=1024, stages=1, warps=4),
}


#: (pairs, gated) -> the most programs that keep x: of 8B shapes on an H200, for the gate as many as
#: its 132 multiprocessors hold at once (benchmarks/results/engine).
_RESIDENT = {(False, False): 768, (False, True): 396, (True, False): 768, (True, True): 528}


def default_shape(n: int, k: int, gated: bool, *, coded: bool = False) -> LinearShape:
    """The launch shape measured best, or that of the shapes of an 8B model on an H100; of codes, on
    an H200."""
    if coded:
        if gated or k > 8192:
            ahead = 1 if gated else 0
            return LinearShape(block_n=4, block_k=1024, stages=1, warps=4, ahead=ahead)
        block_n = 8 if n > 4096 else 4
        return LinearShape(block_n=block_n, block_k=512, stages=1, warps=2, ahead=8 // block_n)
    if (n, k, gated) in _MEASURED:
        return _MEASURED[n, k, gated]
    if gated:
        return LinearShape(block_n=2, block_k=1024, stages=1, warps=4, registers=72)
    if n < 1 << 14 and k % 2048 == 0 and (n <= 4096 or k == 2048 or k >= 8192):
        return LinearShape(block_n=4, block_k=2048, stages=1, warps=8)
    if n >= 1 << 14 or k > 4096:
        return LinearShape(block_n=4, block_k=1024, stages=1, warps=4)
    return LinearShape(block_n=8, block_k=512, stages=1, warps=4)


def shape_for(
    x: torch.Tensor, weight: torch.Tensor | CodedWeight, n: int, gated: bool
) -> LinearShape:
    """The launch shape of n outputs of x with these weights."""
    if isinstance(weight, CodedWeight) and x.dtype.itemsize == 2:
        return _resident_shape(weight, n, gated) or _tile_shape(weight, n, gated)
    return _tile_shape(weight, n, gated)


def _tile_shape(weight: torch.Tensor | CodedWeight, n: int, gated: bool) -> LinearShape:
    """With a program for each tile."""
    coded = isinstance(weight, CodedWeight)
    if isinstance(weight, CodedWeight) and weight.paired:
        return pair_shape(gated)
    return default_shape(n, weight.shape[1], gated, coded=coded)


def _resident_shape(weight: CodedWeight, n: int, gated: bool) -> LinearShape | None:
    """With programs that keep x, in float16, where that was faster in an 8B model on an H200 and a
    thread has a word of eight bytes or more, and registers for two tiles of them."""
    width = weight.codes.shape[1]
    if not 1024 <= width <= 8192 or width % 16 or (weight.paired and weight.group % 16):
        return None
    block_n, warps, programs = 4, 4, _RESIDENT[weight.paired, gated]
    if width > 4096:
        warps, programs = 8, 256 if weight.paired and not gated else 0
    elif weight.paired and not gated and width <= 2048:
        block_n = 8
    if not gated and n < (4096 if weight.paired else 4097):
        programs = 0
    programs = min(programs, n // block_n // 2)
    if n % block_n or not programs:
        return None
    return LinearShape(block_n=block_n, block_k=0, stages=1, warps=warps, programs=programs)


def pair_shape(gated: bool) -> LinearShape:
    """For 4-bit numbers in pairs: each thread holds 8 bytes of every row, and as many of x."""
    if gated:
        return LinearShape(block_n=4, block_k=512, stages=1, warps=2, ahead=1)
    return LinearShape(block_n=8, block_k=1024, stages=1, warps=4, ahead=1)


def _forms(
    weight: torch.Tensor | CodedWeight, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The matrix that the kernel reads, its scales, if any, and their unit."""
    if isinstance(weight, CodedWeight):
        return weight.codes, weight.scales, weight.unit
    return weight, unused, 1.0


def _cut(weight: torch.Tensor | CodedWeight, n: int, shape: LinearShape) -> dict[str, int]:
    """The kernel's constants of a launch shape and of a form of weights."""
    matrix, _, _ = _forms(weight, weight.codes if isinstance(weight, CodedWeight) else weight)
    width = matrix.shape[1]
    paired = isinstance(weight, CodedWeight) and weight.paired
    block_k = min(shape.block_k, power_of_2(width))
    return {
        "BLOCK_N": shape.block_n,
        "BLOCK_K": block_k,
        "STAGES": shape.stages,
        "STEPS": ceil_div(width, block_k) if shape.ahead or paired else 0,
        "AHEAD": shape.ahead,
        "SCALED": isinstance(weight, CodedWeight) and not paired,
        "GROUP": weight.group if isinstance(weight, CodedWeight) and paired else 0,
        "EVEN_N": n % shape.block_n == 0,
        "EVEN_K": width % block_k == 0,
        "FAST": isinstance(row_linear, JITFunction),
    }


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | CodedWeight,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    activation: Activation = Activation.SILU,
    pdl: bool = False,
    shape: LinearShape | None = None,
) -> None:
    """out `[1, n]` = f(norm(x) weight^T + bias) + residual for one row.

    weight: `[n, k]`, or `[2 n, k]` when gated (gate rows first; f = act(gate) * up; no bias then);
    e4m3 codes have a scale for each output, pairs of 4-bit numbers words for groups.
    `gain` turns the RMS norm of x on. `residual` may be `out` itself.
    """
    k, n = x.shape[1], out.shape[1]
    codes, scales, unit = _forms(weight, x)
    shape = shape or shape_for(x, weight, n, gated)
    tensors = (
        x,
        codes,
        scales,
        x if bias is None else bias,
        x if residual is None else residual,
        x if gain is None else gain,
        out,
    )
    constants = {
        "NORM": gain is not None,
        "GATED": gated,
        "RESIDUAL": residual is not None,
        "BIAS": bias is not None,
        "GELU": activation is Activation.GELU_TANH,
        "PDL": pdl,
        **shape.options(pdl),
    }
    if shape.programs:
        grid = (min(shape.programs, n // shape.block_n),)
        constants |= _span(weight, shape)
        resident_linear[grid](*tensors, unit, eps, n, **constants)
    else:
        constants |= _cut(weight, n, shape)
        row_linear[(ceil_div(n, shape.block_n),)](*tensors, unit, eps, n, k, **constants)


def _span(weight: torch.Tensor | CodedWeight, shape: LinearShape) -> dict[str, int]:
    """The constants of the kernel whose programs keep the row."""
    assert isinstance(weight, CodedWeight)
    words = weight.codes.shape[1] // 8
    return {
        "BLOCK_N": shape.block_n,
        "WORDS": words,
        "SPAN": power_of_2(words),
        "GROUP": weight.group if weight.paired else 0,
        "FAST": isinstance(resident_linear, JITFunction),
    }


def shared_linear(
    x: torch.Tensor,
    weight: torch.Tensor | CodedWeight,
    reduction: Reduction,
    *,
    h: torch.Tensor,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    shape: LinearShape | None = None,
) -> None:
    """h `[1, n]` += the sum over ranks of x weight^T + bias, in float32 and in the ranks' order.

    h is the same on every rank, before and after; n is at most the mailboxes' capacity.
    """
    k, n = x.shape[1], h.shape[1]
    codes, scales, unit = _forms(weight, x)
    shape = shape or _tile_shape(weight, n, gated=False)
    boxes = reduction.boxes
    shared_row_linear[(ceil_div(n, shape.block_n) + ceil_div(n, _COLLECT),)](
        x,
        codes,
        scales,
        x if bias is None else bias,
        h,
        boxes.addresses,
        boxes.done,
        boxes.failed,
        reduction.index,
        reduce.MAX_POLLS,
        boxes.rank,
        unit,
        n,
        k,
        BIAS=bias is not None,
        PDL=pdl,
        **_cut(weight, n, shape),
        CAPACITY=boxes.capacity,
        SIZE=boxes.size,
        SIZE_P=power_of_2(boxes.size),
        COLLECT=_COLLECT,
        **shape.options(pdl),
    )
