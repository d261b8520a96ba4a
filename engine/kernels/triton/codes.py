"""Typed wrappers of the kernels that make codes, and the library's product of them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.jit import codes as kernels
from engine.kernels.triton.coded import CODE_GROUP, CodedRows, CodedWeight, Sums
from engine.kernels.triton.elementwise import launch_options
from engine.kernels.triton.launch import Repeated, ceil_div, power_of_2
from engine.torch_private import scaled_mm

_NORM_CODES = Repeated(kernels.norm_codes)
_GATED_CODES = Repeated(kernels.gated_codes)
_PAIR_NUMBERS = Repeated(kernels.pair_numbers)
_GROUP_NUMBERS = Repeated(kernels.group_numbers)


def row_codes(
    h: Tensor,
    *,
    out: CodedRows,
    gain: Tensor | None = None,
    eps: float = 0.0,
    delta: Tensor | Sums | None = None,
    pdl: bool = False,
) -> None:
    """out = codes of rows `[m, k]`: of rms(h) * gain, or of h without a gain. With `delta`,
    h += delta first."""
    rows, width = h.shape
    block, group = _cut(out, width)
    sums = delta if isinstance(delta, Sums) else None
    _NORM_CODES[(out.shape[0],)](
        h,
        h if delta is None else delta if sums is None else sums.values,
        h if sums is None else sums.row_scales,
        h if sums is None else sums.channel_scales,
        h if gain is None else gain,
        out.codes,
        out.scales,
        eps,
        rows,
        width,
        out.scales.shape[1],
        BLOCK=block,
        GROUP=group,
        ADD=delta is not None,
        SCALED=sums is not None,
        NORM=gain is not None,
        PDL=pdl,
        num_warps=_warps(block),
        **launch_options(pdl),
    )


def gated_codes(
    gate_up: Tensor,
    *,
    out: CodedRows,
    activation: Activation = Activation.SILU,
    pdl: bool = False,
) -> None:
    """out = codes of act(left half) * right half of gate_up `[m, 2 k]`."""
    rows, width = gate_up.shape[0], out.shape[1]
    block, group = _cut(out, width)
    _GATED_CODES[(out.shape[0],)](
        gate_up,
        out.codes,
        out.scales,
        rows,
        width,
        out.scales.shape[1],
        BLOCK=block,
        GROUP=group,
        GELU=activation is Activation.GELU_TANH,
        PDL=pdl,
        num_warps=_warps(block),
        **launch_options(pdl),
    )


def _cut(out: CodedRows, width: int) -> tuple[int, int]:
    """Columns of a program, and of one scale."""
    block = power_of_2(width)
    groups = out.scales.shape[0]
    return block, block if groups == 1 else width // groups


def _warps(block: int) -> int:
    return min(16, max(4, block // 1024))


def channel_codes(weight: CodedWeight) -> CodedWeight:
    """The matrix of `weight`, which is in pairs, as e4m3 codes with scales for each output: those
    that it keeps, or made now."""
    if weight.channels is not None:
        return weight.channels
    n, k = weight.shape
    assert weight.channel_scales is not None
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=weight.codes.device)
    block = 32
    _PAIR_NUMBERS[(ceil_div(n, block), k // (2 * weight.group))](
        weight.codes,
        weight.scales,
        weight.channel_scales,
        codes,
        weight.unit,
        n,
        k // 2,
        BLOCK_N=block,
        GROUP=weight.group,
        num_warps=4,
    )
    return CodedWeight(codes=codes, scales=weight.channel_scales)


def group_numbers(weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix of `weight`, e4m3 codes with scales for groups, in numbers."""
    n, k = weight.shape
    numbers = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    block = 32
    _GROUP_NUMBERS[(ceil_div(n, block), k // CODE_GROUP)](
        weight.codes,
        weight.scales,
        numbers,
        n,
        k,
        BLOCK_N=block,
        GROUP=CODE_GROUP,
        num_warps=4,
    )
    return numbers


def coded_product(x: CodedRows, weight: CodedWeight, *, out: Tensor, bias: Tensor | None) -> None:
    """out `[m, n]` = x weight^T + bias by the library's product; x has a scale for each row, the
    weights for each output, or both for groups of columns (`CodedWeight.by_block`)."""
    if not out.is_cuda:
        wide = _numbers(x.codes, x.scales) @ _numbers(weight.codes, weight.scales).t()
        out.copy_(wide if bias is None else wide + bias)
        return
    blocks = weight.block_scales
    scaled_mm(
        x.codes,
        weight.codes.t(),
        scale_a=x.scales.view(-1, 1) if blocks is None else x.scales.t(),
        scale_b=weight.scales if blocks is None else blocks.t(),
        bias=bias,
        out_dtype=out.dtype,
        use_fast_accum=blocks is None,
        out=out,
    )


def coded_sums(x: CodedRows, weight: CodedWeight, one: Tensor, dtype: torch.dtype) -> Sums:
    """x weight^T by the library's product with one scale for all, `one`, which is the fastest; x
    has a scale for each row, the weights for each output. bfloat16 has room for sums of codes."""
    device, size = x.codes.device, (x.shape[0], weight.shape[0])
    if device.type == "cuda":
        values = torch.empty(size, dtype=dtype, device=device)
        scaled_mm(
            x.codes,
            weight.codes.t(),
            scale_a=one,
            scale_b=one,
            bias=None,
            out_dtype=dtype,
            use_fast_accum=True,
            out=values,
        )
    else:
        values = x.codes.float() @ weight.codes.float().t()
    return Sums(values=values, row_scales=x.scales, channel_scales=weight.scales)


def _numbers(codes: Tensor, scales: Tensor) -> Tensor:
    groups = codes.float().view(codes.shape[0], scales.shape[0], -1)
    return (groups * scales.t()[:, :, None]).flatten(1)
