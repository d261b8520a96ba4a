# mypy: ignore-errors
"""The paged copy: rows of KV from blocks or staging into blocks or staging, one kernel."""

import triton
import triton.language as tl


# One kernel for a pair of pools, whatever a message holds: compiling another takes a second.
@triton.jit(do_not_specialize=["cells", "heads", "tiles", "chunks"])
def copy_rows(
    source,
    target,
    source_ids,
    target_ids,
    cells,
    heads,
    words,
    tiles,
    chunks,
    source_layer,
    source_page,
    source_half,
    source_head,
    target_layer,
    target_page,
    target_half,
    target_head,
    HALVES: tl.constexpr,
    SOURCE_PAGED: tl.constexpr,
    TARGET_PAGED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy chunks of WORDS words of 8 bytes; a row is what is contiguous on both sides.

    Addresses are integers: `target` may be another GPU's memory, mapped into this process. Rows are
    counted [layer][cell][half][head]; `*_layer`, `*_page`, `*_half`, `*_head` are strides in words.
    A paged side finds the page of its n-th cell in its ids.
    """
    read = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    write = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row = chunk // tiles
        offsets = (chunk % tiles) * WORDS + tl.arange(0, WORDS)
        head = (row % heads).to(tl.int64)
        row = row // heads
        half = (row % HALVES).to(tl.int64)
        cell = (row // HALVES) % cells
        layer = (row // HALVES // cells).to(tl.int64)
        from_page = cell.to(tl.int64)
        to_page = cell.to(tl.int64)
        if SOURCE_PAGED:
            from_page = tl.load(source_ids + cell).to(tl.int64)
        if TARGET_PAGED:
            to_page = tl.load(target_ids + cell).to(tl.int64)
        start = layer * source_layer + from_page * source_page
        start += half * source_half + head * source_head
        end = layer * target_layer + to_page * target_page
        end += half * target_half + head * target_head
        mask = offsets < words
        value = tl.load(read + start + offsets, mask=mask)
        tl.store(write + end + offsets, value, mask=mask)
