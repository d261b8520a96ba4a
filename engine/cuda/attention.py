"""Attention of a step, one layer at a time: of decode rows alone, of decode rows beside some
hundreds of prompt tokens under a CUDA graph, or of larger chunks by the fastest kernel for each.

cuDNN is about twice as fast as the paged kernel on Hopper, but wants contiguous keys and a plan for
each length. So it serves long chunks: their own tokens from the projection's rows (for all chunks
in one call, when these are equally long and have no history), and segments of their history,
gathered from the pool. A call may run past the end of its chunk: causality keeps later keys out,
and later rows are dropped. Lengths are rounded up, so that few plans exist; each thread makes its
own before it runs steps. Everything else (short chunks, rests of histories, other head sizes,
float32) goes through the paged kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.cuda.inputs import ChunkInputs, DecodeInputs
from engine.cuda.options import StepShape
from engine.cuda.plan import (
    DENSE_STEP,
    DENSE_TOKENS,
    HISTORY_SEGMENTS,
    ChunkLayout,
    DenseChunk,
    dense_length,
)
from engine.cuda.staging import DeviceStream
from engine.kernels.triton.attention import DecodeScratch, DecodeShape, decode_attention
from engine.kernels.triton.elementwise import rope_write
from engine.kernels.triton.prefill_attention import (
    MIXED_TILE,
    ChunkScratch,
    gather_history,
    merge_attention,
    prefill_attention,
    query_tile,
)


class LayerAttention(Protocol):
    """Attention of one step over its paged KV."""

    def write_kv(self, layer: int, qkv: Tensor) -> None:
        """Rotate the chunks' rows of qkv `[rows, (heads + 2 kv_heads) * dim]`, write their KV."""
        ...

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """`[rows, heads * dim]` after `write_kv`; the KV of decode rows is written here."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """One rank's heads. scale: factor of q . k before the softmax; pdl: kernels may start while
    their predecessor drains."""

    num_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    pdl: bool = False

    @property
    def width(self) -> int:
        """Columns of attention's output."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionState:
    """What all steps of an engine share: the pool's layers, cos and sin of each layer, scratch.
    attended: the output of steps under graphs; its padding rows stay finite."""

    sizes: AttentionSizes
    kv: Sequence[Tensor]
    rotations: Sequence[tuple[Tensor, Tensor]]
    stream: DeviceStream
    decode_scratch: DecodeScratch
    chunk_scratch: ChunkScratch
    attended: Tensor
    dense: DenseAttention | None


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """A step of decode rows alone."""

    state: AttentionState
    inputs: DecodeInputs
    shape: DecodeShape

    def write_kv(self, layer: int, qkv: Tensor) -> None:
        """Part of `attend`."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Attention of every row."""
        return self.rows(layer, qkv, qkv.new_empty(qkv.shape[0], self.state.sizes.width))

    def rows(self, layer: int, qkv: Tensor, out: Tensor) -> Tensor:
        """Attention of the rows of qkv, which are decode rows, into `out`."""
        state, sizes = self.state, self.state.sizes
        decode_attention(
            qkv,
            *state.rotations[layer],
            state.kv[layer],
            self.inputs.indptr,
            self.inputs.blocks,
            self.inputs.lengths,
            state.decode_scratch,
            self.shape,
            num_heads=sizes.num_heads,
            scale=sizes.scale,
            out=out,
            pdl=sizes.pdl,
        )
        return out


def _rotate_and_write(state: AttentionState, inputs: ChunkInputs, layer: int, qkv: Tensor) -> None:
    rope_write(
        qkv,
        *state.rotations[layer],
        inputs.positions[: qkv.shape[0]],
        inputs.slots[: qkv.shape[0]],
        state.kv[layer],
        state.sizes.num_heads,
    )


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """A step with chunks of some hundreds of tokens, by launches that no number of it changes."""

    state: AttentionState
    decodes: DecodeInputs
    chunks: ChunkInputs
    shape: StepShape

    def write_kv(self, layer: int, qkv: Tensor) -> None:
        """The chunks' rows; decode rows have no slot."""
        _rotate_and_write(self.state, self.chunks, layer, qkv)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Attention of every row but padding: chunks, which the matrix units bound, beside decode
        rows, which memory bounds."""
        state, sizes = self.state, self.state.sizes
        out = state.attended[: qkv.shape[0]]
        if not self.shape.decode_programs:
            self._chunks(layer, qkv, out)
            return out
        with state.stream.beside():
            self._chunks(layer, qkv, out)
        decode_attention(
            qkv,
            *state.rotations[layer],
            state.kv[layer],
            self.decodes.indptr,
            self.decodes.blocks,
            self.decodes.lengths,
            state.decode_scratch,
            DecodeShape(splits=1, tile=64 if sizes.head_dim <= 128 else 32),
            num_heads=sizes.num_heads,
            scale=sizes.scale,
            out=out,
            counts=self.chunks.counts,
            programs=self.shape.decode_programs,
        )
        state.stream.join()
        return out

    def _chunks(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        state, sizes, chunks = self.state, self.state.sizes, self.chunks
        prefill_attention(
            qkv,
            state.kv[layer],
            chunks.tiles[: self.shape.chunk_programs // sizes.num_heads],
            chunks.blocks,
            state.chunk_scratch,
            queries=MIXED_TILE,
            split=True,
            num_heads=sizes.num_heads,
            scale=sizes.scale,
            out=out,
            counts=chunks.counts,
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

    def write_kv(self, layer: int, qkv: Tensor) -> None:
        """The chunks' rows; decode rows have no slot."""
        _rotate_and_write(self.decodes.state, self.chunks, layer, qkv[: self.layout.rows])
        if not self.num_decodes:
            self.written(layer)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Attention of every row. qkv has `layout.overhang` finite rows behind them."""
        state, cut, count = self.decodes.state, self.layout.cut, self.num_decodes
        dense = state.dense
        if dense is not None and not count and not cut.paged:
            out = dense.alone(qkv, self.layout)
            if out is not None:
                return out
        out = qkv.new_empty(self.layout.rows, state.sizes.width)
        if count:
            self.decodes.rows(layer, qkv[:count], out[:count])
            self.written(layer)
        self._paged(layer, qkv, cut.paged, out, split=cut.split)
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
        prefill_attention(
            qkv,
            state.kv[layer],
            self.chunks.tiles[tiles.start : tiles.stop],
            self.chunks.blocks,
            state.chunk_scratch,
            queries=query_tile(qkv.dtype, state.sizes.head_dim),
            split=split,
            num_heads=state.sizes.num_heads,
            scale=state.sizes.scale,
            out=out,
            lse=lse,
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
        block, page = chunk.table, self.decodes.state.kv[layer].shape[3]
        for index, length in enumerate(chunk.segments, start=1):
            blocks = self.chunks.blocks[block : block + length // page]
            block += length // page
            part, lse = dense.history(qkv, chunk, self.decodes.state.kv[layer], blocks, length)
            last = index == len(chunk.segments) and not chunk.tiles
            merge(part, lse, out[rows] if last else None)
        if chunk.tiles:
            self._paged(layer, qkv, chunk.tiles, out, lse=dense.lse)
            part = out[rows].unflatten(1, (-1, dense.sizes.head_dim))
            merge(part, dense.lse[rows], out[rows])


def cudnn_serves(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether cuDNN's attention can be used for this kind of model on this device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if head_dim > 128 or head_dim % 8 or not torch.backends.cudnn.is_available():
        return False
    version = torch.backends.cudnn.version() or 0
    return version >= 90500 and torch.cuda.get_device_capability(device) >= (9, 0)


class DenseAttention:
    """cuDNN's attention of long chunks, and the memory that its parts are merged in: float32
    `[max_tokens, heads, dim]` and one segment of a history. lse: of rows whose attention to the
    rest of their history the paged kernel computes."""

    def __init__(
        self,
        sizes: AttentionSizes,
        max_rows: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_history: int,
    ) -> None:
        self.sizes = sizes
        self._longest = dense_length(max_tokens)
        self._segments = tuple(length for length in HISTORY_SEGMENTS if length <= max_history)
        rows = max_tokens if max_history else 0
        heads, dim = sizes.num_heads, sizes.head_dim
        self._acc = torch.empty(rows, heads, dim, dtype=torch.float32, device=device)
        self._acc_lse = torch.empty(rows, heads, dtype=torch.float32, device=device)
        lse_rows = max_rows if max_history else 0
        self.lse = torch.empty(lse_rows, heads, dtype=torch.float32, device=device)
        self._history = torch.empty(
            2 * sizes.kv_heads * max(self._segments, default=0) * dim,
            dtype=dtype,
            device=device,
        )

    def alone(self, qkv: Tensor, layout: ChunkLayout) -> Tensor | None:
        """Attention of a step of nothing but one chunk, or of equally long ones, without history;
        None for others."""
        chunks = layout.cut.dense
        if any(chunk.segments or chunk.tiles for chunk in chunks):
            return None
        if len(chunks) == 1:
            return self.own(qkv, chunks[0])[0].flatten(1)
        length = dense_length(chunks[0].count)
        if any(chunk.count != length for chunk in chunks):
            return None
        return self._causal(qkv[: layout.rows], length)[0].flatten(0, 1).flatten(1)

    def own(self, qkv: Tensor, chunk: DenseChunk) -> tuple[Tensor, Tensor]:
        """Causal attention to the chunk's own tokens `[count, heads, dim]`, and the logarithms of
        its softmax sums `[count, heads]`."""
        length = dense_length(chunk.count)
        out, lse = self._causal(qkv[chunk.first : chunk.first + length], length)
        return out[0, : chunk.count], lse[0, :, : chunk.count].t()

    def history(
        self, qkv: Tensor, chunk: DenseChunk, kv: Tensor, blocks: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """The same to a segment of the history."""
        sizes = self.sizes
        segment = self._history[: 2 * sizes.kv_heads * length * sizes.head_dim]
        segment = segment.view(2, sizes.kv_heads, length, sizes.head_dim)
        gather_history(kv, blocks, out=segment)
        rows = slice(chunk.first, chunk.first + dense_length(chunk.count))
        out, lse = self._across(qkv[rows], segment)
        return out[0, : chunk.count], lse[0, :, : chunk.count].t()

    def merge(
        self, count: int, own: Tensor, lse: Tensor
    ) -> Callable[[Tensor, Tensor, Tensor | None], None]:
        """Folds further parts into `own`; the last one's result goes to its third argument."""
        acc, acc_lse = self._acc[:count], self._acc_lse[:count]
        merge_attention(acc, acc_lse, own, lse, first=True, out=None)

        def fold(part: Tensor, lse: Tensor, out: Tensor | None) -> None:
            merge_attention(acc, acc_lse, part, lse, first=False, out=out)

        return fold

    def _heads(self, qkv: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.sizes
        heads = qkv.view(-1, length, qkv.shape[1] // sizes.head_dim, sizes.head_dim).transpose(1, 2)
        q, k, v = heads.split((sizes.num_heads, sizes.kv_heads, sizes.kv_heads), dim=1)
        return q, k, v

    def _causal(self, qkv: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """`[chunks, length, heads, dim]` and `[chunks, heads, length]` of chunks of that length."""
        return self._call(*self._heads(qkv, length), causal=True)

    def _across(self, qkv: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
        q, _, _ = self._heads(qkv, qkv.shape[0])
        return self._call(q, segment[0][None], segment[1][None], causal=False)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=self.sizes.scale
        )
        return out.transpose(1, 2), lse.flatten(2)

    def make_plans(self, max_prompts: int) -> None:
        """Have cuDNN plan all that steps can ask of it, in which at most `max_prompts` chunks are
        equally long. For this thread: torch keeps the plans of each apart."""
        sizes = self.sizes
        width = (sizes.num_heads + 2 * sizes.kv_heads) * sizes.head_dim
        qkv = self._history.new_zeros(self._longest, width)
        for length in range(DENSE_TOKENS, self._longest + 1, DENSE_STEP):
            for count in range(1, min(max_prompts, self._longest // length) + 1):
                self._causal(qkv[: count * length], length)
            for segment in self._segments:
                kv = qkv.new_zeros(2, sizes.kv_heads, segment, sizes.head_dim)
                self._across(qkv[:length], kv)
