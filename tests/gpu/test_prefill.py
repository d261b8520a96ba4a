"""Attention of long prompt chunks through cuDNN against the paged triton kernel."""

import pytest
import torch

from engine.batch import SequenceStep
from engine.cuda.layout import ChunkUploader
from engine.cuda.prefill import ChunkAttention, cudnn_serves
from engine.kernels.triton.elementwise import rope_write
from protocol.sampling import SamplingParams

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1024)],
        [(0, 1100)],
        [(0, 1536), (0, 1025), (0, 70)],
        [(0, 1024), (0, 1024)],
        [(33, 1200), (0, 1030), (0, 3)],
    ],
)
def test_dense_chunks_equal_paged_ones(device, chunks):
    if not cudnn_serves(torch.bfloat16, DIM, device):
        pytest.skip("cuDNN's attention is not served on this device")
    torch.manual_seed(5)
    counts = [count for _, count in chunks]
    needed = [-(-(start + count) // PAGE) for start, count in chunks]
    order = torch.randperm(sum(needed)).tolist()
    tables = [tuple(order[sum(needed[:i]) : sum(needed[: i + 1])]) for i in range(len(chunks))]
    steps = [
        SequenceStep(tokens=(1,) * count, start=start, block_ids=table, sampling=SamplingParams())
        for (start, count), table in zip(chunks, tables, strict=True)
    ]
    pool = torch.randn(sum(needed), 2, KV_HEADS, PAGE, DIM, device=device).bfloat16()
    angle = torch.rand(2048, DIM // 2, device=device) * 6.3
    qkv = torch.randn(sum(counts), (HEADS + 2 * KV_HEADS) * DIM, device=device).bfloat16()
    results = []
    for dense in (True, False):
        uploader = ChunkUploader(4096, 8, 1024, device, dense=dense)
        rows = uploader.upload(steps, needed, PAGE)
        assert bool(rows.dense) == dense
        wide = torch.cat((qkv, qkv.new_zeros(rows.padding, qkv.shape[1])))
        copy = pool.clone()
        rope_write(wide, angle.cos(), angle.sin(), rows.positions, rows.slots, copy, HEADS)
        results.append(ChunkAttention(HEADS, KV_HEADS, DIM, DIM**-0.5)(wide, copy, rows).float())
    assert not results[0].isnan().any()
    error = (results[0] - results[1]).norm() / results[1].norm()
    assert error < 5e-3
