"""How much of the device the KV pool may take."""

from __future__ import annotations

from engine.errors import ModelRefused

#: Part of the free memory (after weights) that KV blocks and working memory may use.
MEMORY_SHARE = 0.98
#: Left free for the driver, the graphs' own memory and the fragments of the allocator.
RESERVE_BYTES = 640 << 20


def blocks_that_fit(
    *, free_bytes: int, working_bytes: int, block_bytes: int, share: float, reserve_bytes: int
) -> int:
    """KV blocks in `share` of the free memory, less working memory and the reserve.

    Raises ModelRefused with the figures when not even one fits.
    """
    budget = int(free_bytes * share) - working_bytes - reserve_bytes
    blocks = budget // block_bytes
    if blocks < 1:
        gib = 1 << 30
        raise ModelRefused(
            f"no room for KV blocks: {free_bytes / gib:.2f} GiB free after the weights, "
            f"{working_bytes / gib:.2f} GiB needed as working memory and "
            f"{reserve_bytes / gib:.2f} GiB kept in reserve; a block takes "
            f"{block_bytes / (1 << 20):.2f} MiB",
            param="device",
        )
    return blocks
