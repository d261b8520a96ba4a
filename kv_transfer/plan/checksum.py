"""Checksums of messages, equal on both workers, combined per hand-off at commit. Pure."""

from __future__ import annotations

import zlib

import torch

from kv_transfer.config import ChecksumKind

_MASK = (1 << 62) - 1


def place_checksum(*, generation: int, index: int, source: int, dest: int) -> int:
    """Binds a message to its place: piece `index` of a generation, from rank to rank."""
    return zlib.crc32(f"{generation}/{index}/{source}/{dest}".encode())


def content_checksum(data: torch.Tensor, kind: ChecksumKind, place: int = 0) -> int:
    """The checksum of a message's bytes (1-D), below 2**62. A crc32 of content in another place
    differs; a sum does not depend on `place`."""
    if kind is ChecksumKind.NONE:
        return 0
    if kind is ChecksumKind.CRC32:
        return zlib.crc32(data.cpu().numpy().data, place)
    whole = data.numel() // 4 * 4
    words = data[:whole].view(torch.int32)
    rest = data[whole:]
    return int(words.sum(dtype=torch.int64)) + int(rest.sum(dtype=torch.int64)) & _MASK


def combine(checksums: list[int]) -> int:
    """The checksum of several messages, in any order."""
    return sum(checksums) & _MASK
