"""Columns ordered by importance (GPTQ's act-order), brought together by group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST_GROUP = 16
#: Bits of a group's scale and zero point.
_TABLE_BITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCodes:
    """Codes `[N, K]`, scales and zero points `[N, G]` of columns that lie by group. `columns`: the
    input of each."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    columns: Tensor | None = None


def by_group(stored: GroupedCodes, group_of: Tensor, middle: int) -> GroupedCodes:
    """Columns sorted by group. A rank's slice may have any number of columns of a group: groups are
    halved and filled with columns of value 0 until all have one size, by the size that takes the
    fewest bytes."""
    num_groups = stored.scales.shape[1]
    counts = torch.bincount(group_of, minlength=num_groups)
    size = _best_size(counts, stored.group_size)
    parts = -(-counts // size)
    begins = (parts.cumsum(0) - parts) * size
    order = group_of.argsort(stable=True)
    sorted_groups = group_of[order]
    rank_in_group = torch.arange(len(order), device=order.device) - (
        counts.cumsum(0) - counts
    ).take(sorted_groups)
    places = begins.take(sorted_groups) + rank_in_group

    tables = torch.arange(num_groups, device=order.device).repeat_interleave(parts)
    scales = stored.scales[:, tables]
    zeros = None if stored.zeros is None else stored.zeros[:, tables]
    width = int(parts.sum()) * size
    if zeros is None:
        codes = stored.codes.new_full((stored.codes.shape[0], width), middle)
    else:
        codes = zeros.to(stored.codes.dtype).repeat_interleave(size, 1)
    codes[:, places] = stored.codes[:, order]
    columns = torch.zeros(width, dtype=torch.int64, device=order.device)
    columns[places] = order
    return GroupedCodes(codes=codes, scales=scales, zeros=zeros, group_size=size, columns=columns)


def _best_size(counts: Tensor, group_size: int) -> int:
    sizes = [group_size]
    while sizes[-1] % 2 == 0 and sizes[-1] > _SMALLEST_GROUP:
        sizes.append(sizes[-1] // 2)

    def bits(size: int) -> int:
        parts = int((-(-counts // size)).sum())
        return parts * (4 * size + _TABLE_BITS)

    return min(sizes, key=bits)
