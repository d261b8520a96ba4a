"""Attention of a step, one layer at a time: of decode rows alone, of decode rows beside up to
1,328 prompt tokens under CUDA graphs, or of larger chunks by the fastest kernel for each.

Long chunks are served by cuDNN (engine.cuda.dense) in layers that attend to everything: their own
tokens from the projection's rows (for all chunks in one call, when these are equally long and have
no history), and segments of their history, gathered from the pool. On Hopper a kernel of its own
attends to the chunk's own tokens (windowed_prefill): in layers with a window, and in others where a
chunk without history is not long, or has softcaps. Everything else (short chunks, rests of
histories, tokens whose window begins before the chunk, other head sizes, float32) goes through the
paged kernel. So do, in the last layer, the tokens that are sampled, alone: of the others only the
KV is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from engine.cuda.dense import AttentionSizes, DenseAttention
from engine.cuda.inputs import ChunkInputs, DecodeInputs
from engine.cuda.options import StepShape, is_large
from engine.cuda.plan import AttentionPlanner, ChunkLayout, DenseChunk
from engine.cuda.staging import DeviceStream
from engine.kernels.triton.attention import (
    DecodeScratch,
    DecodeShape,
    ScoreRule,
    decode_attention,
    decode_shape,
    decode_tiles,
    leaves_codes,
)
from engine.kernels.triton.coded import CodedRows
from engine.kernels.triton.elementwise import mark_damaged, rope_write
from engine.kernels.triton.packed_prefill import packed_prefill, packed_tokens
from engine.kernels.triton.prefill_attention import (
    ChunkScratch,
    chunk_shape,
    mixed_shape,
    prefill_attention,
)
from engine.kernels.triton.splits import max_splits
from engine.kernels.triton.windowed_prefill import own_tokens, serves_chunks, windowed_prefill
from protocol.kv_layout import KVGroup


class LayerAttention(Protocol):
    """Attention of one step over its paged KV."""

    def check(self, x: Tensor) -> None:
        """Note which rows of the last layer's input `[rows, hidden]` are not finite."""

    def write_kv(self, layer: int, qkv: Tensor) -> None:
        """Rotate the chunks' rows of qkv `[rows, (heads + 2 kv_heads) * dim]`, write their KV."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """`[rows, heads * dim]` after `write_kv`; the KV of decode rows is written here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What attention of one layer reads: its KV in the pool, cos and sin of each position, the
    tables of its KV group, and its rule of scores."""

    kv: Tensor
    cos: Tensor
    sin: Tensor
    group: int
    rule: ScoreRule


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionState:
    """What all steps of an engine share. attended: the output of steps under graphs; its padding
    rows stay finite. packed: query heads of a KV head share tiles in steps under graphs, in layers
    without a window."""

    sizes: AttentionSizes
    layers: Sequence[AttentionLayer]
    stream: DeviceStream
    decode_scratch: DecodeScratch
    chunk_scratch: ChunkScratch
    attended: Tensor
    dense: DenseAttention | None
    packed: bool = False

    def planner(
        self,
        groups: tuple[KVGroup, ...],
        block_size: int,
        *,
        max_tokens: int,
        last: int,
        rank_heads: set[int],
    ) -> AttentionPlanner:
        """What lays out steps of up to `max_tokens` prompt tokens; `last`: the last layer's group;
        rank_heads: KV heads that ranks have."""
        sizes, dtype, dense = self.sizes, self.attended.dtype, self.dense is not None
        heads, kv_heads, dim = sizes.num_heads, sizes.kv_heads, sizes.head_dim
        own = serves_chunks(dtype, heads, kv_heads, dim, self.attended.device)
        planner = AttentionPlanner(
            groups=groups,
            block_size=block_size,
            heads=heads,
            kv_heads=kv_heads,
            tile=chunk_shape(dtype, dim).queries,
            dense=dense,
            windowed=own,
            own_tokens=own_tokens(dim, max_tokens, dense=dense) if own else 0,
            packed_tokens=packed_tokens(heads, kv_heads) if self.packed else 0,
            last=last,
        )
        others = (
            replace(planner, heads=count * heads // kv_heads, kv_heads=count)
            for count in rank_heads - {kv_heads}
        )
        return replace(planner, others=tuple(others))


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """A step of up to `batch` decode rows alone."""

    state: AttentionState
    inputs: DecodeInputs
    batch: int
    long_context: bool

    def check(self, x: Tensor) -> None:
        """Nothing: all rows are sampled, which shows it."""

    def write_kv(self, layer: int, qkv: Tensor) -> None:
        """Part of `attend`."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Attention of every row."""
        out = qkv.new_empty(qkv.shape[0], self.state.sizes.width)
        self.rows(layer, qkv, out)
        return out

    def leave_codes(self, layer: int, qkv: Tensor, out: CodedRows) -> bool:
        """As `attend`, into `out`; where heads have no scale of their own False, and nothing."""
        if not leaves_codes(self.state.sizes.head_dim):
            return False
        self.rows(layer, qkv, out)
        return True

    def rows(self, layer: int, qkv: Tensor, out: Tensor | CodedRows) -> None:
        """Attention of the rows of qkv, which are decode rows, into `out`."""
        sizes, one, inputs = self.state.sizes, self.state.layers[layer], self.inputs
        shape = decode_cut(sizes, self.batch, self.long_context, one.rule.window)
        decode_attention(
            qkv,
            one.cos,
            one.sin,
            one.kv,
            inputs.starts[one.group],
            inputs.blocks,
            inputs.lengths,
            self.state.decode_scratch,
            shape,
            one.rule,
            num_heads=sizes.num_heads,
            out=out,
            pdl=sizes.pdl,
            table=None if shape.splits else inputs.splits[one.group],
            room=max_splits(self.batch, sizes.kv_heads),
        )


def decode_cut(sizes: AttentionSizes, batch: int, long_context: bool, window: int) -> DecodeShape:
    """How attention of a step of decode rows alone is cut in layers with that window, or none."""
    heads, dim = sizes.kv_heads, sizes.head_dim
    return decode_shape(batch, heads, dim, long_context, window, codes=sizes.codes)


def _rotate_and_write(
    state: AttentionState, inputs: ChunkInputs, layer: int, qkv: Tensor, *, pdl: bool = False
) -> None:
    one = state.layers[layer]
    rope_write(
        qkv,
        one.cos,
        one.sin,
        inputs.positions[: qkv.shape[0]],
        inputs.slots[one.group][: qkv.shape[0]],
        one.kv,
        state.sizes.num_heads,
        one.rule.norms,
        pdl=pdl,
    )


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """A step with chunks under CUDA graphs, by launches that no number of it changes.
    `begins(layer)` is called once the KV of the layers before is on the stream."""

    state: AttentionState
    decodes: DecodeInputs
    chunks: ChunkInputs
    shape: StepShape
    begins: Callable[[int], None]

    def check(self, x: Tensor) -> None:
        """All rows."""
        mark_damaged(x, flags=self.chunks.damaged)

    def write_kv(self, layer: int, qkv: Tensor) -> None:
        """The chunks' rows; decode rows have no slot."""
        self.begins(layer)
        pdl = self.state.sizes.pdl and self._packs(layer)
        _rotate_and_write(self.state, self.chunks, layer, qkv, pdl=pdl)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Attention of every row but padding: chunks, which the matrix units bound, beside decode
        rows, which memory bounds. Chunks go first, whose programs need more room at once: packed
        ones by a launch that their predecessor allows early, others as they are captured first."""
        state = self.state
        out = state.attended[: qkv.shape[0]]
        if not self.shape.decode_programs:
            self._chunks(layer, qkv, out)
            return out
        beside, behind = self._chunks, self._decodes
        if self._packs(layer):
            beside, behind = behind, beside
        with state.stream.beside():
            beside(layer, qkv, out)
        behind(layer, qkv, out)
        state.stream.join()
        return out

    def _packs(self, layer: int) -> bool:
        return self.state.packed and not self.state.layers[layer].rule.window

    def _decodes(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        state, sizes, one = self.state, self.state.sizes, self.state.layers[layer]
        decode_attention(
            qkv,
            one.cos,
            one.sin,
            one.kv,
            self.decodes.starts[one.group],
            self.decodes.blocks,
            self.decodes.lengths,
            state.decode_scratch,
            DecodeShape(splits=0, **decode_tiles(sizes.head_dim)),
            one.rule,
            num_heads=sizes.num_heads,
            out=out,
            table=self.decodes.splits[one.group],
            room=self.shape.decode_programs // sizes.kv_heads,
        )

    def _chunks(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        one, sizes, chunks = self.state.layers[layer], self.state.sizes, self.chunks
        tiles, counts = chunks.tiles[one.group], chunks.counts[one.group]
        rest, heads = (chunks.blocks, self.state.chunk_scratch, one.rule), sizes.num_heads
        if self._packs(layer):
            packed_prefill(
                qkv, one.kv, tiles, *rest, num_heads=heads, out=out, counts=counts, pdl=sizes.pdl
            )
            return
        shape = chunk_shape if is_large(self.shape.rows) else mixed_shape
        prefill_attention(
            qkv,
            one.kv,
            tiles[: self.shape.chunk_programs // heads],
            *rest,
            shape(qkv.dtype, sizes.head_dim),
            split=True,
            num_heads=heads,
            out=out,
            counts=counts,
        )


@dataclass(frozen=True, slots=True)
class LargeStepAttention:
    """A step with chunks that outlasts its launches: each kind of row by the fastest kernel.
    `written(layer)` is called once the layer's KV is on the stream."""

    decodes: DecodeAttention
    chunks: ChunkInputs
    layout: ChunkLayout
    num_decodes: int
    written: Callable[[int], None]

    def check(self, x: Tensor) -> None:
        """All rows."""
        mark_damaged(x, flags=self.chunks.damaged)

    def write_kv(self, layer: int, qkv: Tensor) -> None:
        """The chunks' rows; decode rows have no slot."""
        _rotate_and_write(self.decodes.state, self.chunks, layer, qkv[: self.layout.rows])
        if not self.num_decodes:
            self.written(layer)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Attention of every row, in the last layer of those that are kept, if `cut.ends` says so.
        qkv has `layout.overhang` finite rows behind them."""
        state, count = self.decodes.state, self.num_decodes
        dense, cut = state.dense, self.layout.cuts[state.layers[layer].group]
        if layer == len(state.layers) - 1 and cut.ends is not None:
            cut = replace(cut, paged=cut.ends, split=True, windowed=range(0), dense=())
        if dense is not None and cut.dense and not (count or cut.paged or cut.windowed):
            out = dense.alone(qkv, self.layout, cut)
            if out is not None:
                return out
        out = qkv.new_empty(self.layout.rows, state.sizes.width)
        if count:
            self.decodes.rows(layer, qkv[:count], out[:count])
            self.written(layer)
        self._paged(layer, qkv, cut.paged, out, split=cut.split)
        self._windowed(layer, qkv, cut.windowed, out)
        for chunk in cut.dense:
            assert dense is not None
            self._dense(dense, layer, qkv, chunk, out)
        return out

    def _paged(
        self,
        layer: int,
        qkv: Tensor,
        tiles: range,
        out: Tensor,
        *,
        split: bool = False,
        lse: Tensor | None = None,
    ) -> None:
        if not tiles:
            return
        state = self.decodes.state
        one = state.layers[layer]
        prefill_attention(
            qkv,
            one.kv,
            self.chunks.tiles[one.group][tiles.start : tiles.stop],
            self.chunks.blocks,
            state.chunk_scratch,
            one.rule,
            chunk_shape(qkv.dtype, state.sizes.head_dim),
            split=split,
            num_heads=state.sizes.num_heads,
            out=out,
            lse=lse,
        )

    def _windowed(self, layer: int, qkv: Tensor, tiles: range, out: Tensor) -> None:
        if not tiles:
            return
        one, sizes = self.decodes.state.layers[layer], self.decodes.state.sizes
        windowed_prefill(
            qkv,
            self.chunks.tiles[one.group][tiles.start : tiles.stop],
            one.rule,
            num_heads=sizes.num_heads,
            kv_heads=sizes.kv_heads,
            out=out,
        )

    def _dense(
        self, dense: DenseAttention, layer: int, qkv: Tensor, chunk: DenseChunk, out: Tensor
    ) -> None:
        """Attention to the chunk's own tokens, segments of its history, and the history's rest."""
        rows = slice(chunk.first, chunk.first + chunk.count)
        own, lse = dense.own(qkv, chunk)
        if not chunk.segments and not chunk.tiles:
            out[rows] = own.flatten(1)
            return
        merge = dense.merge(chunk.count, own, lse)
        kv = self.decodes.state.layers[layer].kv
        block, page = chunk.table, kv.shape[3]
        for index, length in enumerate(chunk.segments, start=1):
            blocks = self.chunks.blocks[block : block + length // page]
            block += length // page
            part, lse = dense.history(qkv, chunk, kv, blocks, length)
            last = index == len(chunk.segments) and not chunk.tiles
            merge(part, lse, out[rows] if last else None)
        if chunk.tiles:
            self._paged(layer, qkv, chunk.tiles, out, lse=dense.lse)
            part = out[rows].unflatten(1, (-1, dense.sizes.head_dim))
            merge(part, dense.lse[rows], out[rows])
