# mypy: ignore-errors
"""The paged copy: rows of KV from blocks or staging into blocks or staging, one kernel."""

import triton
import triton.language as tl


# One kernel for a pair of pools, whatever a message holds: compiling another takes a second.
@triton.jit(do_not_specialize=["blocks", "tiles", "chunks"])
def copy_rows(
    source,
    target,
    source_ids,
    target_ids,
    blocks,
    words,
    tiles,
    chunks,
    source_layer,
    source_block,
    source_half,
    target_layer,
    target_block,
    target_half,
    HALVES: tl.constexpr,
    SOURCE_PAGED: tl.constexpr,
    TARGET_PAGED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy chunks of WORDS words of 8 bytes; a row is what is contiguous on both sides.

    Addresses are integers: `target` may be another GPU's memory, mapped into this process. Rows are
    counted [layer][block][half]; `*_layer`, `*_block`, `*_half` are strides in words. A paged side
    finds the page of its n-th block in its ids.
    """
    read = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    write = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row = chunk // tiles
        offsets = (chunk % tiles) * WORDS + tl.arange(0, WORDS)
        half = (row % HALVES).to(tl.int64)
        block = (row // HALVES) % blocks
        layer = (row // HALVES // blocks).to(tl.int64)
        source_page = block.to(tl.int64)
        target_page = block.to(tl.int64)
        if SOURCE_PAGED:
            source_page = tl.load(source_ids + block).to(tl.int64)
        if TARGET_PAGED:
            target_page = tl.load(target_ids + block).to(tl.int64)
        start = layer * source_layer + source_page * source_block + half * source_half
        end = layer * target_layer + target_page * target_block + half * target_half
        mask = offsets < words
        value = tl.load(read + start + offsets, mask=mask)
        tl.store(write + end + offsets, value, mask=mask)
