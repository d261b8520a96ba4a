"""KV as e4m3 codes: what is written is KV rounded to them, and what is read is what they mean."""

import pytest
import torch

from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.cuda.options import CudaOptions
from engine.cuda.runner import CudaRunner
from engine.kernels.triton.attention import DecodeScratch, DecodeShape, ScoreRule, decode_attention
from engine.kernels.triton.prefill_attention import gather_history
from engine.kv.sizing import block_bytes
from protocol.errors import InvalidRequest
from tests.support.cuda import HostSource, seq, tiny_config

pytestmark = pytest.mark.usefixtures("few_programs")

E4M3 = torch.float8_e4m3fn


def make_runner(device, kv_dtype):
    runner = CudaRunner(
        EngineConfig(model_path="unused", dtype="float32", kv_dtype=kv_dtype, device=str(device)),
        tiny_config(),
        HostSource(device),
        CudaOptions(max_batch=4, max_chunk_tokens=64),
    )
    runner.open(8)
    runner.start()
    return runner


def test_prompts_and_decode_rows(device):
    """The first layer's KV does not depend on KV: its codes are the rounded numbers."""
    runner, plain = make_runner(device, "fp8"), make_runner(device, None)
    assert runner.pool.data.nbytes * 4 == plain.pool.data.nbytes
    assert block_bytes(runner.config, tiny_config()) == runner.pool.data[:, 0].nbytes
    prompt = seq([7 * i % 200 for i in range(40)], 0, (1, 2, 3))
    for batch in ((prompt,), (seq([9], 40, (1, 2, 3)), seq([3, 5, 8], 0, (5,)))):
        runner.run(StepBatch(sequences=batch))
        plain.run(StepBatch(sequences=batch))
    got, want = (engine.pool.layers[0].float() for engine in (runner, plain))
    assert torch.count_nonzero(got) > 40 * 2 * 2 * 16
    torch.testing.assert_close(got, want.to(E4M3).float(), rtol=2.0**-3, atol=2.0**-9)
    assert (got == want.to(E4M3).float()).float().mean() > 0.99
    got, want = (engine.pool.layers[1].float() for engine in (runner, plain))
    assert (got - want).norm() / want.norm() < 0.08


@pytest.mark.parametrize(("splits", "tile", "warps"), [(1, 64, 2), (3, 64, 2), (2, 128, 4)])
def test_decode_attention_reads_codes(device, splits, tile, warps):
    """As exact as its types allow, with codes and with the numbers they mean: outputs are rounded
    to `half`, weights of the softmax to that or, beside codes, to float16."""
    heads, kv_heads, dim, page = 4, 2, 16, 16
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    codes = torch.randn(12, 2, kv_heads, page, dim, device=device).to(E4M3)
    lengths = torch.tensor([150, 33], dtype=torch.int32, device=device)
    # Row 1 writes into block 6; both read block 5.
    tables = ((0, 3, 1, 5, 4, 7, 8, 9, 10, 11), (2, 5, 6))
    qkv = torch.randn(2, (heads + 2 * kv_heads) * dim, device=device)
    qkv = qkv.to(E4M3).to(half)
    numbers = codes.to(half)
    for pool, weight_error in ((codes, 2.0**-11), (numbers, torch.finfo(half).eps / 2)):
        out = torch.empty(2, heads * dim, dtype=half, device=device)
        decode_attention(
            qkv,
            torch.ones(160, dim // 2, device=device),
            torch.zeros(160, dim // 2, device=device),
            pool,
            torch.tensor([0, 10], dtype=torch.int32, device=device),
            torch.tensor(sum(tables, ()), dtype=torch.int32, device=device),
            lengths,
            DecodeScratch(2, 2 * splits, heads, dim, device),
            DecodeShape(splits=splits, tile=tile, warps=warps),
            ScoreRule(scale=0.25),
            num_heads=heads,
            out=out,
        )
        for row, table in enumerate(tables):
            kv = pool[list(table)].double().permute(1, 2, 0, 3, 4).flatten(2, 3)
            kv = kv[:, :, : lengths[row]].repeat_interleave(heads // kv_heads, dim=1)
            new = qkv[row].double().view(-1, dim)[heads:].view(2, kv_heads, dim)
            assert torch.equal(kv[:, :: heads // kv_heads, -1], new)
            q = qkv[row].double().view(-1, dim)[:heads]
            weights = torch.softmax(torch.einsum("hd,htd->ht", q, kv[0]) * 0.25, dim=1)
            want, size = (torch.einsum("ht,htd->hd", weights, v) for v in (kv[1], kv[1].abs()))
            bound = want.abs() * (torch.finfo(half).eps / 2) + size * weight_error + 2e-5
            assert torch.all((out[row].double().view(heads, dim) - want).abs() <= bound)
    assert torch.equal(codes.to(half), numbers)


def test_a_gathered_history_is_numbers(device):
    codes = torch.randn(5, 2, 3, 16, 32, device=device).to(E4M3)
    blocks = torch.tensor([4, 1, 2], dtype=torch.int32, device=device)
    out = torch.empty(2, 3, 48, 32, device=device)
    gather_history(codes, blocks, out=out)
    want = codes.float()[blocks.long()].permute(1, 2, 0, 3, 4).flatten(2, 3)
    assert torch.equal(out, want)


def test_other_names_are_refused():
    with pytest.raises(InvalidRequest, match="kv_dtype 'fp4' is not fp8"):
        EngineConfig(model_path="unused", kv_dtype="fp4")
    with pytest.raises(InvalidRequest, match="dtype 'float8_e4m3fn' is not one of"):
        EngineConfig(model_path="unused", dtype="float8_e4m3fn")
