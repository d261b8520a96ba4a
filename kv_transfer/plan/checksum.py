"""Sums over the bytes of a message, equal on both sides, combined per hand-off at commit."""

from __future__ import annotations

import zlib

import torch

from kv_transfer.config import ChecksumKind

_MASK = (1 << 62) - 1


def message_checksum(
    data: torch.Tensor,
    kind: ChecksumKind,
    *,
    generation: int,
    sequence: int,
    source: int,
    dest: int,
) -> int:
    """The checksum of one message (bytes, 1-D), bound to its place in the hand-off, below 2**62."""
    seed = place_checksum(generation=generation, sequence=sequence, source=source, dest=dest)
    if kind is ChecksumKind.NONE:
        return seed
    if kind is ChecksumKind.CRC32:
        return zlib.crc32(data.cpu().numpy().data, seed)
    return (seed + _word_sum(data)) & _MASK


def place_checksum(*, generation: int, sequence: int, source: int, dest: int) -> int:
    """The part of a message's checksum that binds it to its place, and all of it when content is
    not summed."""
    return zlib.crc32(f"{generation}/{sequence}/{source}/{dest}".encode())


def content_checksum(data: torch.Tensor, kind: ChecksumKind) -> int:
    """The sum of a part of a message (bytes, 1-D). A device link adds up parts and place."""
    if kind is ChecksumKind.NONE:
        return 0
    if kind is ChecksumKind.CRC32:
        return zlib.crc32(data.cpu().numpy().data)
    return _word_sum(data) & _MASK


def combine(checksums: list[int]) -> int:
    """The checksum of several messages, in any order."""
    return sum(checksums) & _MASK


def _word_sum(data: torch.Tensor) -> int:
    whole = data.numel() // 4 * 4
    words = data[:whole].view(torch.int32)
    rest = data[whole:]
    return int(words.sum(dtype=torch.int64)) + int(rest.sum(dtype=torch.int64))
