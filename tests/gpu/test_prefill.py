"""Attention of long prompt chunks through cuDNN against the paged triton kernel."""

import pytest
import torch

from engine.batch import SequenceStep, StepBatch
from engine.cuda.attention import (
    AttentionLayer,
    AttentionState,
    DecodeAttention,
    LargeStepAttention,
)
from engine.cuda.dense import AttentionSizes, DenseAttention, cudnn_serves
from engine.cuda.inputs import ChunkCapacity, ChunkInputs, DecodeInputs
from engine.cuda.plan import AttentionPlanner, BatchLimits, plan_step
from engine.cuda.staging import DeviceStream
from engine.kernels.triton.attention import DecodeScratch, ScoreRule
from engine.kernels.triton.prefill_attention import ChunkScratch
from engine.kernels.triton.windowed_prefill import serves_chunks
from protocol.kv_layout import KVGroup
from protocol.sampling import SamplingParams

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16
SIZES = AttentionSizes(num_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5)
PLAIN = ScoreRule(scale=SIZES.scale)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def attend(plan, qkv, pool, angle, *, dense=False, windowed=False, rule=PLAIN, sizes=SIZES):
    """The output of attention and the layout of a step."""
    device = qkv.device
    planner = AttentionPlanner(
        groups=(KVGroup(window=rule.window or None),),
        block_size=PAGE,
        heads=HEADS,
        kv_heads=KV_HEADS,
        tile=128,
        dense=dense,
        windowed=windowed,
        own_tokens=8192 * windowed,
    )
    layout = planner.lay_out(plan, ())
    decodes = DecodeInputs(8, 4096, device, block_size=PAGE, groups=planner.groups)
    chunks = ChunkInputs(ChunkCapacity(rows=8200, kept=8200, tiles=400, blocks=4096), device)
    decodes.upload(plan)
    chunks.upload(plan, layout, PAGE)
    cudnn = DenseAttention(sizes, 8200, 8192, qkv.dtype, device, max_history=16384)
    state = AttentionState(
        sizes=sizes,
        stream=DeviceStream(device),
        layers=[
            AttentionLayer(
                kv=pool,
                cos=angle.cos(),
                sin=angle.sin(),
                group=0,
                rule=rule,
            )
        ],
        decode_scratch=DecodeScratch(8, 8 * 128, HEADS, sizes.head_dim, device),
        chunk_scratch=ChunkScratch(HEADS, sizes.head_dim, qkv.dtype, device),
        attended=qkv[:0],
        dense=cudnn if dense else None,
    )
    written = []
    attention = LargeStepAttention(
        DecodeAttention(state, decodes, 8, False), chunks, layout, len(plan.decodes), written.append
    )
    wide = torch.cat((qkv, qkv.new_zeros(layout.overhang, qkv.shape[1])))
    attention.write_kv(0, wide)
    out = attention.attend(0, wide).float()
    assert written == [0]
    torch.cuda.synchronize(device)  # kernels read pinned memory that goes with the inputs
    return out, layout


def planned(chunks, window=None):
    """A step of chunks (history, tokens) with shuffled blocks, and how many blocks they have."""
    torch.manual_seed(5)
    needed = [-(-(start + count) // PAGE) for start, count in chunks]
    order = torch.randperm(sum(needed)).tolist()
    tables = [tuple(order[sum(needed[:i]) : sum(needed[: i + 1])]) for i in range(len(chunks))]
    steps = [
        SequenceStep(
            tokens=(1,) * count,
            start=start,
            block_tables=(table[max(0, start - window + 1) // PAGE if window else 0 :],),
            sampling=SamplingParams(),
        )
        for (start, count), table in zip(chunks, tables, strict=True)
    ]
    limits = BatchLimits(
        block_size=PAGE,
        num_blocks=sum(needed),
        vocab_size=100,
        max_model_len=16384,
        max_batch=8,
        max_chunk_tokens=8192,
        groups=(KVGroup(window=window),),
    )
    return plan_step(StepBatch(sequences=tuple(steps)), limits, []), sum(needed)


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1024)],
        [(0, 1100)],
        [(0, 1536), (0, 1025), (0, 70)],
        [(0, 1024), (0, 1024)],
        [(33, 1200), (0, 1030), (0, 3)],
        [(2048, 1024)],
        [(40, 1), (8192 + 2 * 2048 + 100, 1100), (2100, 1500), (4096, 30)],
    ],
)
def test_dense_chunks_equal_paged_ones(device, chunks):
    if not cudnn_serves(torch.bfloat16, DIM, device):
        pytest.skip("cuDNN's attention is not served on this device")
    plan, pool_blocks = planned(chunks)
    pool = torch.randn(pool_blocks, 2, KV_HEADS, PAGE, DIM, device=device).bfloat16()
    angle = torch.rand(16384, DIM // 2, device=device) * 6.3
    rows = sum(count for _, count in chunks)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, device=device).bfloat16()
    got, layout = attend(plan, qkv, pool.clone(), angle, dense=True)
    want, paged = attend(plan, qkv, pool.clone(), angle, dense=False)
    assert len(layout.cuts[0].dense) == sum(count >= 1024 for _, count in chunks)
    assert paged.cuts[0].dense == ()
    assert not got.isnan().any()
    assert (got - want).norm() / want.norm() < 5e-3


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(
    "chunks", [[(0, 2048)], [(0, 1030)], [(0, 1100), (700, 2500), (40, 1), (0, 70), (2000, 1024)]]
)
def test_chunks_with_a_kernel_of_their_own_equal_paged_ones(device, window, dim, softcap, chunks):
    if not serves_chunks(torch.bfloat16, HEADS, KV_HEADS, dim, device):
        pytest.skip("this device has no copy engine")
    plan, num_blocks = planned(chunks, window=window)
    pool = torch.randn(num_blocks, 2, KV_HEADS, PAGE, dim, device=device).bfloat16()
    angle = torch.rand(16384, dim // 2, device=device) * 6.3
    rows = sum(count for _, count in chunks)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * dim, device=device).bfloat16()
    scale = dim**-0.5
    sizes = AttentionSizes(num_heads=HEADS, kv_heads=KV_HEADS, head_dim=dim, scale=scale)
    rule = ScoreRule(scale=scale, softcap=softcap, window=window or 0)
    got, layout = attend(plan, qkv, pool.clone(), angle, windowed=True, rule=rule, sizes=sizes)
    want, paged = attend(plan, qkv, pool.clone(), angle, rule=rule, sizes=sizes)
    assert layout.cuts[0].windowed
    assert not paged.cuts[0].windowed
    assert not got.isnan().any()
    assert (got - want).norm() / want.norm() < 5e-3
