"""4-bit codes, two to a byte: the low nibble holds the even column."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 .. 15 `[N, K]` as uint8 `[N, ceil(K / 2)]`; the last high nibble may be unused."""
    codes = codes.to(torch.uint8)
    if codes.shape[1] % 2:
        codes = torch.cat((codes, codes.new_zeros(codes.shape[0], 1)), 1)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()


def unpack_nibbles(packed: Tensor, num_columns: int) -> Tensor:
    """The inverse: uint8 codes `[N, num_columns]`."""
    both = torch.stack((packed & 15, packed >> 4), -1)
    return both.flatten(1)[:, :num_columns].contiguous()
