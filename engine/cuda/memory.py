"""Device memory of an engine: the size of the KV pool, and what steps need beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.attention import AttentionLayer, AttentionState, decode_cut
from engine.cuda.dense import AttentionSizes, DenseAttention, cudnn_serves
from engine.cuda.inputs import ChunkCapacity, ChunkInputs, DecodeInputs
from engine.cuda.model import RankShape
from engine.cuda.options import CudaOptions, StepShapes
from engine.cuda.pending import ResultBuffers
from engine.cuda.products.matrices import Matrix
from engine.cuda.sampler import TokenSampler
from engine.cuda.splits import shape_room
from engine.cuda.staging import DeviceStream
from engine.errors import ModelRefused
from engine.kernels.triton.attention import DecodeScratch, ScoreRule
from engine.kernels.triton.elementwise import HeadNorms
from engine.kernels.triton.packed_prefill import max_packed_tiles, serves_packed
from engine.kernels.triton.prefill_attention import ChunkScratch, chunk_shape, max_parts
from engine.kernels.triton.windowed_prefill import max_tiles
from engine.kv.pool import KVPool
from engine.model.config import ModelConfig, QkNorm
from engine.model.kv_groups import group_layers
from engine.model.weights import ModelWeights
from protocol.kv_layout import KVGroup, pages_for

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What steps need beside the KV pool, at fixed addresses; logits: of steps under graphs."""

    decodes: DecodeInputs
    chunks: ChunkInputs
    attention: AttentionState
    logits: Tensor
    sampler: TokenSampler
    results: ResultBuffers

    @staticmethod
    def make(
        options: CudaOptions,
        shapes: StepShapes,
        sizes: RankShape,
        model: ModelConfig,
        weights: ModelWeights[Matrix],
        pool: KVPool,
        stream: DeviceStream,
        *,
        groups: tuple[KVGroup, ...],
        max_model_len: int,
    ) -> StepMemory:
        """The memory of one rank's steps."""
        batch, device, page = options.max_batch, pool.device, pool.block_size
        # However few blocks there are: any number of sequences may share those of a long prefix.
        table = batch * pages_for(groups, page, max_model_len)
        chunk = batch * pages_for(groups, page, max_model_len, chunk=2)
        chunk += len(groups) * (options.max_chunk_tokens // page + 4 * batch)  # aligned by 16 bytes
        rows = options.max_chunk_tokens + batch
        tile = chunk_shape(weights.embedding.dtype, sizes.head_dim).queries
        tiles = 2 * (options.max_chunk_tokens // tile + max_parts(sizes.num_heads)) + 3 * batch
        group = sizes.num_heads // sizes.kv_heads
        tiles += max_tiles(options.max_chunk_tokens, batch, group)
        attention = _attention_state(
            options, shapes, sizes, model, weights, pool, stream, max_model_len
        )
        if attention.packed:
            graph_rows, heads = max(shapes.mixed_rows, default=0), (sizes.num_heads, sizes.kv_heads)
            tiles = max(tiles, max_packed_tiles(graph_rows, batch, *heads))
        capacity = ChunkCapacity(
            rows=rows,
            kept=rows,
            tiles=tiles,
            blocks=chunk,
            groups=len(groups),
        )
        num_ids = weights.head.shape[0]
        return StepMemory(
            decodes=DecodeInputs(
                batch,
                table,
                device,
                block_size=page,
                groups=groups,
                max_splits=max(shape_room(shape, sizes.kv_heads) for shape in shapes.all),
            ),
            chunks=ChunkInputs(capacity, device),
            attention=attention,
            logits=weights.embedding.new_empty(batch, num_ids),
            sampler=TokenSampler(batch, model.vocab_size, sizes, device),
            results=ResultBuffers(batch, rows, device),
        )


def _attention_state(
    options: CudaOptions,
    shapes: StepShapes,
    sizes: RankShape,
    model: ModelConfig,
    weights: ModelWeights[Matrix],
    pool: KVPool,
    stream: DeviceStream,
    max_model_len: int,
) -> AttentionState:
    heads, dim, device = sizes.num_heads, sizes.head_dim, pool.device
    dtype = weights.embedding.dtype
    attention = AttentionSizes(
        num_heads=heads,
        kv_heads=sizes.kv_heads,
        head_dim=dim,
        scale=model.attention_scale,
        pdl=stream.overlaps_launches,
        codes=pool.dtype.itemsize == 1,
    )
    layers = _attention_layers(model, weights, pool, max_model_len)
    parts = [
        shape.rows * decode_cut(attention, shape.rows, shape.long_context, window).splits
        for shape in shapes.decode
        for window in {layer.rule.window for layer in layers}
    ]
    parts += [shape_room(shape, sizes.kv_heads) for shape in shapes.all]
    dense = None
    plain = any(not layer.rule.window and not layer.rule.softcap for layer in layers)
    if plain and cudnn_serves(dtype, dim, device):
        dense = DenseAttention(
            attention,
            options.max_chunk_tokens + options.max_batch,
            min(options.max_chunk_tokens, max_model_len),
            dtype,
            device,
            max_history=max_model_len,
        )
    graph_rows = max(shapes.mixed_rows, default=0)
    return AttentionState(
        sizes=attention,
        stream=stream,
        layers=layers,
        decode_scratch=DecodeScratch(options.max_batch, max(parts), heads, dim, device),
        chunk_scratch=ChunkScratch(heads, dim, dtype, device),
        attended=torch.zeros(graph_rows, attention.width, dtype=dtype, device=device),
        dense=dense,
        packed=not model.attention_softcap and serves_packed(layers[0].kv, heads),
    )


def _attention_layers(
    model: ModelConfig, weights: ModelWeights[Matrix], pool: KVPool, max_model_len: int
) -> tuple[AttentionLayer, ...]:
    places = group_layers(model, max_model_len).places
    windows = model.windows(max_model_len)
    found = []
    for index, (cos, sin) in enumerate(weights.rotations):
        group, slot = places[index]
        layer, norms = weights.layers[index], None
        if model.qk_norm is QkNorm.HEAD:
            norms = HeadNorms(q=layer.q_norm, k=layer.k_norm, eps=model.rms_norm_eps)
        rule = ScoreRule(
            scale=model.attention_scale,
            softcap=model.attention_softcap or 0.0,
            window=windows[index] or 0,
            norms=norms,
        )
        kv = pool.layers[slot]
        found.append(AttentionLayer(kv=kv, cos=cos, sin=sin, group=group, rule=rule))
    return tuple(found)
