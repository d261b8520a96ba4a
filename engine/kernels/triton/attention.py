"""Typed wrappers of decode attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.jit.decode_attention import merge_parts, paged_decode
from engine.kernels.triton.coded import CODE_GROUP, SCALE_ROWS, CodedRows
from engine.kernels.triton.elementwise import HeadNorms, launch_options, norm_arguments
from engine.kernels.triton.launch import power_of_2
from engine.kernels.triton.splits import MERGE_ROOM, WAVE, cuts_by_length

_MAX_SPLITS = 128
#: Splits whose parts are on their way together when they are merged. More of them take registers
#: from the whole kernel: 32 sequences on an H200 take 26.6 us with 2, 32.3 with 16.
_AT_ONCE = 2
#: Dims of a head that one program of the merging kernel takes, and the splits that it is compiled
#: for: few sequences need many programs to be quick, of many sequences (8) each program costs.
_PIECE = 32
_MANY, _MANY_PIECE, _MANY_SPLITS = 8, 128, 32
#: Splits where a context may be long.
_LONG_SPLITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """How decode attention is cut: splits of a context, or 0 where each is cut by itself
    (`plan_splits`), tokens per tile, least tiles per split."""

    splits: int
    tile: int = 64
    min_tiles: int = 1
    stages: int = 3
    warps: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """Scores of one layer: `scale` times q . k, through a softcap where that is not 0; of the last
    `window` tokens where that is not 0, else of all; norms: of heads before they turn, if any."""

    scale: float
    softcap: float = 0.0
    window: int = 0
    norms: HeadNorms | None = None

    def constants(self) -> dict[str, float]:
        """What kernels are compiled for."""
        return {"WINDOW": self.window, "SOFTCAP": self.softcap}


#: Context tokens that a program takes at once, and its warps: with heads of more than 128 dims, and
#: with others.
_WIDE, _NARROW = (32, 2), (64, 2)
#: The same for codes of heads of up to 128 dims, in steps of so many rows or with a long context:
#: 8 and 16 rows of 24,000 tokens on an H200 take 7.05 and 9.98 ms a step instead of 8.03 and 11.9.
_CODED, _CODED_ROWS = (128, 4), 8


def decode_tiles(head_dim: int) -> dict[str, int]:
    """Fields of a DecodeShape that follow from the size of a head."""
    tile, warps = _WIDE if head_dim > 128 else _NARROW
    return {"tile": tile, "warps": warps}


def decode_shape(
    batch: int,
    kv_heads: int,
    head_dim: int,
    long_context: bool,
    window: int = 0,
    *,
    codes: bool = False,
) -> DecodeShape:
    """Splits for a batch: enough programs to fill the card, more where one context of a small batch
    may be long. A window is short. codes: KV is e4m3.

    Tile and warps are the best of those measured on an H100 over contexts of 512 to 32,768 tokens
    and batches of 1 to 256; splits, stages and what codes take, on an H200.
    """
    tile, warps = _WIDE if head_dim > 128 else _NARROW
    if codes and head_dim <= 128 and not window and (long_context or batch >= _CODED_ROWS):
        tile, warps = _CODED
    if cuts_by_length(batch, kv_heads):
        return DecodeShape(splits=0, tile=tile, warps=warps)
    splits = min(_MAX_SPLITS, WAVE // (batch * kv_heads))
    min_tiles = 1
    if long_context and not window and splits < _LONG_SPLITS:
        splits = _LONG_SPLITS
        min_tiles = 1024 // max(64, tile)
    return DecodeShape(splits=splits, tile=tile, min_tiles=min_tiles, warps=warps)


class DecodeScratch:
    """Partial results of splits, shared by all layers: they run one after another on one stream.

    parts: the most splits of all sequences together that will use it.
    """

    def __init__(
        self, batch: int, parts: int, num_heads: int, head_dim: int, device: torch.device
    ) -> None:
        rows = parts * num_heads
        width = power_of_2(head_dim)
        self.partial = torch.empty(rows * width, dtype=torch.float32, device=device)
        self.stats = torch.empty(rows * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(batch * num_heads, dtype=torch.int32, device=device)


def head_sizes(pool: torch.Tensor, num_heads: int) -> dict[str, int]:
    """Constants of every attention kernel over one layer of a pool."""
    _, _, kv_heads, page, dim = pool.shape
    return {
        "HEADS": num_heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "DIM_P": power_of_2(dim),
        "PAGE": page,
    }


def decode_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    starts: torch.Tensor,
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    scratch: DecodeScratch,
    shape: DecodeShape,
    rule: ScoreRule,
    *,
    num_heads: int,
    out: torch.Tensor | CodedRows,
    pdl: bool = False,
    table: torch.Tensor | None = None,
    room: int = 0,
) -> None:
    """Rotate and store each row's new token, then attend over its whole paged context.

    qkv: `[batch, (heads + 2 kv_heads) * dim]` straight from the projection; pool: one layer,
    `[block, 2, kv_heads, page, dim]`; starts, blocks, lengths and, codes where heads may be
    (`leaves_codes`), out: see `paged_decode`. table: where shape has no splits, those of
    `plan_splits`, with memory for `room` splits; rows that are not in it are left alone.
    """
    kv_heads = pool.shape[2]
    grid = (kv_heads, qkv.shape[0], shape.splits) if table is None else (kv_heads * room, 1, 1)
    paged_decode[grid](
        qkv,
        cos,
        sin,
        pool,
        starts,
        blocks,
        lengths,
        *_parts(out),
        *(scratch.partial, scratch.stats, scratch.counters),
        scratch.counters if table is None else table,
        *norm_arguments(rule.norms, cos),
        rule.scale,
        *(shape.splits, shape.min_tiles),
        **head_sizes(pool, num_heads),
        **_group_sizes(num_heads // kv_heads),
        TILE=shape.tile,
        MAX_SPLITS=MERGE_ROOM,
        AT_ONCE=_AT_ONCE,
        DEALT=table is not None,
        STAGES=shape.stages,
        **rule.constants(),
        NORM=rule.norms is not None,
        STRIDE=SCALE_ROWS,
        PDL=pdl,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=shape.warps,
        **launch_options(pdl),
    )
    if table is None:
        _merge(lengths, scratch, shape, pool, num_heads, out, window=rule.window, pdl=pdl)


def _group_sizes(group: int) -> dict[str, int]:
    """Constants of so many query heads of a KV head: of products, and where splits are merged."""
    return {"GROUP": group, "GROUP_P": max(16, power_of_2(group)), "MERGE_P": power_of_2(group)}


def leaves_codes(head_dim: int) -> bool:
    """Whether attention can leave codes for a product of few rows: a head is a scale's columns."""
    return head_dim == CODE_GROUP


def _parts(out: torch.Tensor | CodedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix, and the scales of codes (or anything)."""
    return (out.codes, out.scales) if isinstance(out, CodedRows) else (out, out)


def _merge(
    lengths: torch.Tensor,
    scratch: DecodeScratch,
    shape: DecodeShape,
    pool: torch.Tensor,
    num_heads: int,
    out: torch.Tensor | CodedRows,
    *,
    window: int,
    pdl: bool,
) -> None:
    _, _, kv_heads, _, dim = pool.shape
    width = power_of_2(dim)
    piece, room = _PIECE, _MAX_SPLITS
    if out.shape[0] >= _MANY:
        piece, room = _MANY_PIECE, max(_MANY_SPLITS, power_of_2(shape.splits))
    piece = width if isinstance(out, CodedRows) else min(width, piece)
    merge_parts[(num_heads, width // piece, out.shape[0])](
        scratch.partial,
        scratch.stats,
        lengths,
        *_parts(out),
        shape.splits,
        shape.min_tiles,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_P=width,
        TILE=shape.tile,
        PIECE=piece,
        MAX_SPLITS=room,
        WINDOW=window,
        STRIDE=SCALE_ROWS,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
