"""cuDNN's attention of long prompt chunks.

It is about twice as fast as the paged kernel on Hopper, but wants contiguous keys and a plan for
each length. A call may run past the end of its chunk: causality keeps later keys out, and later
rows are dropped. Lengths are rounded up, so that few plans exist; each thread makes its own before
it runs steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.plan import (
    DENSE_STEP,
    DENSE_TOKENS,
    HISTORY_SEGMENTS,
    ChunkLayout,
    DenseChunk,
    GroupCut,
    dense_length,
)
from engine.kernels.triton.prefill_attention import gather_history, merge_attention
from engine.torch_private import cudnn_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """One rank's heads. scale: factor of q . k before the softmax; pdl: kernels may start while
    their predecessor drains; codes: KV is e4m3."""

    num_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    pdl: bool = False
    codes: bool = False

    @property
    def width(self) -> int:
        """Columns of attention's output."""
        return self.num_heads * self.head_dim


def cudnn_serves(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether cuDNN's attention can be used for this kind of model on this device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if head_dim > 256 or head_dim % 8 or not torch.backends.cudnn.is_available():
        return False
    version, capability = (
        torch.backends.cudnn.version() or 0,
        torch.cuda.get_device_capability(device),
    )
    if head_dim > 128:  # of Hopper cards; measured with 9.19 (624 TFLOP/s with 256)
        return version >= 91900 and capability == (9, 0)
    return version >= 90500 and capability >= (9, 0)


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

    def alone(self, qkv: Tensor, layout: ChunkLayout, cut: GroupCut) -> Tensor | None:
        """Attention of a step of nothing but one chunk, or of equally long ones, without history;
        None for others."""
        chunks = cut.dense
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
        out, lse = cudnn_attention(q, k, v, causal=causal, scale=self.sizes.scale)
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
