"""The fast CPU operations against the reference, operation by operation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.base import Geometry, StepInputs
from engine.kernels.cpu import operations
from tests.support import reference_kernels as reference
from tests.support.engine import NUM_BLOCKS, step_of

BLOCK, DIM = 4, 8
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


def geometry(q_heads: int, kv_heads: int, dtype: torch.dtype) -> Geometry:
    return Geometry(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        block_size=BLOCK,
        scale=0.3,
        dtype=dtype,
    )


def tables(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query starts, contexts and a padded block table, as the reference wants them."""
    starts = torch.tensor([0, *inputs.queries]).cumsum(0)
    longest = max(map(len, inputs.block_ids))
    table = [[*ids, *[0] * (longest - len(ids))] for ids in inputs.block_ids]
    return starts, torch.tensor(inputs.contexts), torch.tensor(table)


LENGTHS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 4, 5, 9])), min_size=1, max_size=5
)


@settings(max_examples=40)
@given(LENGTHS, st.sampled_from([(4, 2), (3, 3), (6, 1)]), st.sampled_from(list(TOLERANCE)))
def test_attention_over_mixed_chunks_and_decodes(lengths, heads, dtype):
    shape = geometry(*heads, dtype)
    inputs = step_of(lengths, BLOCK)
    torch.manual_seed(0)
    kv = torch.randn(NUM_BLOCKS, 2, heads[1], BLOCK, DIM).to(dtype)
    q = torch.randn(inputs.num_tokens, heads[0], DIM).to(dtype)
    table = torch.zeros(200, DIM // 2)
    plan = operations.CpuKernels(shape).prepare(inputs, table, table)
    got = operations.CpuKernels(shape).paged_attention(q, kv, plan)
    expected = reference.paged_attention(q, kv, *tables(inputs), shape.scale)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_chunk_longer_than_a_tile_sees_exactly_its_past(monkeypatch):
    monkeypatch.setattr(operations, "_QUERY_TILE", 8)
    shape = geometry(4, 2, torch.float32)
    inputs = step_of([(5, 30), (0, 17), (50, 1)], BLOCK)
    kv = torch.randn(NUM_BLOCKS, 2, 2, BLOCK, DIM)
    q = torch.randn(inputs.num_tokens, 4, DIM)
    table = torch.zeros(200, DIM // 2)
    plan = operations.CpuKernels(shape).prepare(inputs, table, table)
    expected = reference.paged_attention(q, kv, *tables(inputs), shape.scale)
    torch.testing.assert_close(operations.CpuKernels(shape).paged_attention(q, kv, plan), expected)


def test_decodes_of_very_different_lengths_are_not_padded_to_the_longest():
    inputs = step_of([(90, 1), (80, 1), (9, 1), (7, 1)], BLOCK)
    table = torch.zeros(200, DIM // 2)
    plan = operations.CpuKernels(geometry(4, 2, torch.float32)).prepare(inputs, table, table)
    assert [group.num_sequences for group in plan.groups] == [2, 2]
    assert plan.groups[1].length == 12


@pytest.mark.parametrize("left", [1e4, torch.inf, torch.nan])
def test_what_others_left_in_the_pool_does_not_matter(left):
    shape = geometry(4, 2, torch.float32)
    inputs = step_of([(10, 1), (6, 1), (2, 1), (0, 6), (0, 1)], BLOCK)
    kv = torch.randn(NUM_BLOCKS, 2, 2, BLOCK, DIM)
    q = torch.randn(inputs.num_tokens, 4, DIM)
    table = torch.zeros(200, DIM // 2)
    plan = operations.CpuKernels(shape).prepare(inputs, table, table)
    before = operations.CpuKernels(shape).paged_attention(q, kv, plan)
    used = {
        (ids[position // BLOCK], position % BLOCK)
        for ids, context in zip(inputs.block_ids, inputs.contexts, strict=True)
        for position in range(context)
    }
    for block in range(NUM_BLOCKS):
        for offset in range(BLOCK):
            if (block, offset) not in used:
                kv[block, :, :, offset] = left
    assert torch.equal(operations.CpuKernels(shape).paged_attention(q, kv, plan), before)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rotation_and_kv_writes(dtype):
    shape = geometry(4, 2, dtype)
    inputs = step_of([(6, 1), (3, 5)], BLOCK)
    angles = torch.arange(200.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])[None, :]
    cos, sin = angles.cos(), angles.sin()
    qkv = torch.randn(inputs.num_tokens, 8 * DIM).to(dtype)
    fast_kv, slow_kv = torch.zeros(2, NUM_BLOCKS, 2, 2, BLOCK, DIM, dtype=dtype).unbind()
    slow_q = reference.rope_and_write_kv(
        qkv.clone(), cos[inputs.positions], sin[inputs.positions], inputs.slots, slow_kv, 4
    )
    plan = operations.CpuKernels(shape).prepare(inputs, cos, sin)
    fast_q = operations.CpuKernels(shape).rope_and_write_kv(qkv, fast_kv, plan)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(fast_q, slow_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fast_kv, slow_kv, rtol=tolerance, atol=tolerance)
    assert (fast_kv != 0).any(-1).sum() == 2 * 2 * inputs.num_tokens


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_norm(dtype):
    x, weight = torch.randn(5, 16).to(dtype), torch.randn(16).to(dtype)
    got = operations.CpuKernels(geometry(4, 2, dtype)).rms_norm(x, weight, 1e-5)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_with_residual_and_gate(dtype, bias, rows):
    torch.manual_seed(2)
    kernels = operations.CpuKernels(geometry(4, 2, dtype))
    x, residual = torch.randn(rows, 32).to(dtype), torch.randn(rows, 48).to(dtype)
    weight, up = (torch.randn(48, 32).to(dtype) * 0.3 for _ in range(2))
    first, second = (torch.randn(48).to(dtype) if bias else None for _ in range(2))
    none = torch.zeros(48)
    exact = x.float() @ weight.float().t() + (none if first is None else first.float())
    exact_up = x.float() @ up.float().t() + (none if second is None else second.float())
    linear = kernels.linear(weight, first)
    scale = {"rtol": TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    torch.testing.assert_close(linear(x).float(), exact, **scale)
    torch.testing.assert_close(linear.add(x, residual).float(), exact + residual.float(), **scale)
    gated = kernels.gated_linear(weight, up, first, second)(x).float()
    stacked = torch.cat((exact, exact_up), dim=-1)
    torch.testing.assert_close(gated, reference.swiglu(stacked), **scale)


def test_packing_is_for_bfloat16_only():
    assert not operations.packs(torch.float32)
    kernels = operations.CpuKernels(geometry(4, 2, torch.float32))
    assert isinstance(kernels.linear(torch.zeros(4, 4), None), operations.DenseLinear)


def test_without_the_operators_bfloat16_is_not_packed(monkeypatch):
    monkeypatch.setattr(operations, "_product", None)
    kernels = operations.CpuKernels(geometry(4, 2, torch.bfloat16))
    assert isinstance(kernels.linear(torch.zeros(4, 4).bfloat16(), None), operations.DenseLinear)
    gated = kernels.gated_linear(*torch.zeros(2, 4, 4).bfloat16(), None, None)
    assert isinstance(gated, operations.DenseGated)


def test_huge_pages_keep_the_content():
    weights = [torch.randn(600, 1000) for _ in range(6)]
    copies = [weight.clone() for weight in weights]
    operations.advise_huge_pages(weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, copies, strict=True))
