"""Steps in float64 that round activations to the model's type where kernels do."""

from enum import Enum

import torch
from torch.nn.functional import silu


class Places(Enum):
    """Where a step rounds: one row is neither rounded between norm and product nor between gate
    and activation; steps of few rows round a norm's input times its gain, others the norm, too."""

    NOWHERE = "nowhere"
    ROW = "row"
    FEW = "few"
    SINGLE = "single"


def unpair_codes(pairs, group):
    """The inverse of engine.kernels.triton.coded.pair_codes."""
    n, width = pairs.shape
    groups = pairs.view(n, width // group, 1, group)
    return torch.cat((groups & 15, groups >> 4), dim=2).view(n, 2 * width)


def numbers_of(weight):
    """What a kernel makes of codes, float32; numbers as they are."""
    if isinstance(weight, torch.Tensor):
        return weight
    scales = weight.scales.float().T[:, :, None]
    codes, zeros = weight.codes.float(), 0.0
    if weight.paired:
        codes = unpair_codes(weight.codes, weight.group).float()
        words = weight.scales.T[:, :, None]
        scales = (words >> 16).short().view(torch.float16).float() * weight.unit
        zeros = words.short().view(torch.bfloat16).float() - 128.0
    return ((codes.unflatten(1, (-1, weight.group)) - zeros) * scales).flatten(1)


def rounded_logits(weights, h, attention, eps, places):
    """Logits, float64, of embedded rows h with weights in any form of the GPU's kernels."""

    stored = torch.float64 if places is Places.NOWHERE else h.dtype
    unrounded_norms = places in (Places.NOWHERE, Places.ROW)

    def rounded(value):
        return value.to(stored).double()

    def normed(rows, gain, *, first=False):
        inverse = torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)
        if unrounded_norms:
            return rows * gain.double() * inverse
        if places is Places.FEW and not first:
            return rounded(rows * gain.double()) * inverse
        return rounded(rounded(rows * inverse) * gain.double())

    def times(rows, weight):
        return rows @ numbers_of(weight).double().T

    rows = h.double()
    for index, layer in enumerate(weights.layers):
        first = index == 0
        qkv = times(normed(rows, layer.attention_norm, first=first), layer.qkv).to(stored)
        rows = rounded(times(attention.attend(index, qkv).double(), layer.out) + rows)
        gate, up = times(normed(rows, layer.mlp_norm), layer.gate_up).chunk(2, dim=1)
        if unrounded_norms:
            act = rounded(silu(gate) * up)
        else:
            act = rounded(rounded(silu(rounded(gate))) * rounded(up))
        rows = rounded(times(act, layer.down) + rows)
    return rounded(times(normed(rows, weights.norm), weights.head))
