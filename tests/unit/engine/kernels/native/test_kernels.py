"""The compiled CPU kernels against the reference and against float64, on odd shapes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from engine.kernels.base import Geometry
from engine.kernels.cpu.operations import CpuPlan
from engine.kernels.native import build, kernels
from tests.support import reference_kernels as reference
from tests.support.engine import NUM_BLOCKS, step_of

pytestmark = pytest.mark.skipif(
    build.load_library() is None, reason="no C++ compiler, or a processor without AVX-512 BF16"
)
BF16 = torch.bfloat16


def native(
    q_heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    block: int = 16,
    threads: int = 2,
    softcap: float | None = None,
):
    made = kernels.NativeKernels(
        Geometry(
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            block_size=block,
            scale=dim**-0.5,
            dtype=BF16,
            softcap=softcap,
        )
    )
    made.use_threads(threads)
    return made


def close(got: Tensor, exact: Tensor) -> None:
    """Within two roundings to bfloat16 of the exact result, or of its typical size near zero."""
    torch.testing.assert_close(
        got.double(), exact.double(), rtol=2**-7, atol=2**-8 * float(exact.abs().mean() + 1e-6)
    )


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 5, 12, 13, 16, 31, 200]),
    st.sampled_from([1, 16, 31, 33, 96]),
    st.sampled_from([2, 34, 576]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_products_with_bias_and_residual(rows, outputs, inputs, biased, added, threads):
    torch.manual_seed(rows * outputs + inputs)
    x, weight = torch.randn(rows, inputs).to(BF16), torch.randn(outputs, inputs).to(BF16)
    bias = torch.randn(outputs).to(BF16) if biased else None
    residual = torch.randn(rows, outputs).to(BF16) if added else None
    linear = native(threads=threads).linear(weight, bias)
    got = linear(x) if residual is None else linear.add(x, residual)
    exact = x.double() @ weight.double().t()
    for part in (bias, residual):
        exact = exact if part is None else exact + part.double()
    close(got, exact)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 48, 64), (7, 17, 30), (40, 33, 128)])
@pytest.mark.parametrize("biased", [True, False])
def test_gated_products(rows, outputs, inputs, biased):
    torch.manual_seed(rows)
    x, gate, up = (torch.randn(n, inputs).to(BF16) for n in (rows, outputs, outputs))
    biases = [torch.randn(outputs).to(BF16) if biased else None for _ in range(2)]
    got = native().gated_linear(gate, up, *biases)(x)
    wide = [None if bias is None else bias.double() for bias in biases]
    turned = functional.silu(functional.linear(x.double(), gate.double(), wide[0]))
    close(got, turned * functional.linear(x.double(), up.double(), wide[1]))


def test_an_odd_number_of_inputs_is_left_to_torch():
    x, weight = torch.randn(3, 7).to(BF16), torch.randn(5, 7).to(BF16)
    close(native().linear(weight, None)(x), x.double() @ weight.double().t())
    close(
        native().gated_linear(weight, weight, None, None)(x),
        functional.silu(x.double() @ weight.double().t()) * (x.double() @ weight.double().t()),
    )


LENGTHS = st.lists(
    st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 1, 2, 13, 64, 65])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(
    LENGTHS,
    st.sampled_from([(9, 3), (4, 4), (8, 2), (8, 1), (5, 1)]),
    st.sampled_from([64, 96, 128, 256]),
    st.sampled_from([16, 32, 11]),
    st.sampled_from([None, None, 7, 40]),
    st.sampled_from([None, None, 0.7]),
)
def test_attention_over_mixed_chunks_and_decodes(lengths, heads, dim, block, window, softcap):
    """What no row of a sequence sees may be no number."""
    inputs = step_of(lengths, block)
    torch.manual_seed(0)
    kv = torch.randn(NUM_BLOCKS, 2, heads[1], block, dim).to(BF16)
    qkv = torch.randn(inputs.num_tokens, heads[0] + 2 * heads[1], dim).to(BF16)
    made = native(*heads, dim, block, softcap=softcap)
    plan = made.prepare(inputs, torch.zeros(200, dim // 2), torch.zeros(200, dim // 2), window)
    stale = kv.clone()
    rows = zip(inputs.contexts, inputs.queries, inputs.block_ids, strict=True)
    for context, count, ids in rows:
        for at in range(0 if window is None else max(0, context - count + 1 - window)):
            stale[ids[at // block], :, :, at % block] = torch.nan
    got = made.paged_attention(qkv[:, : heads[0]], stale, plan)
    starts = torch.tensor([0, *inputs.queries]).cumsum(0)
    longest = max(map(len, inputs.block_ids))
    table = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in inputs.block_ids])
    exact = reference.paged_attention(
        qkv[:, : heads[0]].double(),
        kv.double(),
        starts,
        torch.tensor(inputs.contexts),
        table,
        dim**-0.5,
        window,
        softcap,
    )
    torch.testing.assert_close(got.double(), exact.double(), rtol=2e-2, atol=1e-2)


def test_scores_far_apart_neither_overflow_nor_vanish():
    inputs = step_of([(40, 1), (10, 20)], 16)
    kv = (torch.randn(NUM_BLOCKS, 2, 2, 16, 64) * 50).to(BF16)
    qkv = (torch.randn(inputs.num_tokens, 10, 64) * 50).to(BF16)
    made = native()
    plan = made.prepare(inputs, torch.zeros(200, 32), torch.zeros(200, 32))
    assert made.paged_attention(qkv[:, :6], kv, plan).isfinite().all()


def test_what_others_left_in_the_pool_does_not_matter():
    inputs = step_of([(40, 1), (2, 1), (0, 6), (30, 70)], 16)
    kv = torch.randn(NUM_BLOCKS, 2, 2, 16, 64).to(BF16)
    qkv = torch.randn(inputs.num_tokens, 10, 64).to(BF16)
    made = native()
    plan = made.prepare(inputs, torch.zeros(200, 32), torch.zeros(200, 32))
    before = made.paged_attention(qkv[:, :6], kv, plan)
    used = torch.zeros(NUM_BLOCKS, 16, dtype=torch.bool)
    for ids, context in zip(inputs.block_ids, inputs.contexts, strict=True):
        for position in range(context):
            used[ids[position // 16], position % 16] = True
    kv.permute(0, 3, 1, 2, 4)[~used] = float("nan")
    assert torch.equal(made.paged_attention(qkv[:, :6], kv, plan), before)


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_rotation_and_kv_writes(dim):
    inputs = step_of([(6, 1), (3, 50)], 16)
    angles = torch.arange(200.0)[:, None] * torch.linspace(1, 0.01, dim // 2)[None, :]
    cos, sin = angles.cos(), angles.sin()
    qkv = torch.randn(inputs.num_tokens, 10 * dim).to(BF16)
    fast_kv, slow_kv = torch.zeros(2, NUM_BLOCKS, 2, 2, 16, dim, dtype=BF16).unbind()
    slow_q = reference.rope_and_write_kv(
        qkv.clone(), cos[inputs.positions], sin[inputs.positions], inputs.slots, slow_kv, 6
    )
    made = native(dim=dim)
    fast_q = made.rope_and_write_kv(qkv, fast_kv, made.prepare(inputs, cos, sin))
    close(fast_q, slow_q)
    close(fast_kv, slow_kv)
    assert (fast_kv != 0).any(-1).sum() == 2 * 2 * inputs.num_tokens


@pytest.mark.parametrize("shape", [(1, 576), (5, 17), (40, 64)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_norm(shape, dtype):
    x, weight = torch.randn(shape).to(BF16), torch.randn(shape[1]).to(dtype)
    close(native().rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_with_a_matrix_unit_torch_runs_steps_of_many_rows():
    """Both ways of one step agree, and so do a chunk by one and a decode by the other."""
    torch.manual_seed(5)
    shape = native().geometry
    ours, both = native(), kernels.NativeKernels(shape, matrix_unit=True)
    weight, bias = (torch.randn(640, 64) / 8).to(BF16), torch.randn(640).to(BF16)
    angles = torch.arange(200.0)[:, None] * torch.linspace(1, 0.01, 32)[None, :]
    pools = torch.zeros(2, NUM_BLOCKS, 2, 2, 16, 64, dtype=BF16).unbind()
    for lengths in ([(0, 40), (0, 3)], [(40, 1), (3, 1)]):
        inputs = step_of(lengths, 16)
        x = torch.randn(inputs.num_tokens, 64).to(BF16)
        results = []
        for made, kv in zip((ours, both), pools, strict=True):
            plan = made.prepare(inputs, angles.cos(), angles.sin())
            normed = made.rms_norm(x, weight[0], 1e-5)
            qkv = made.linear(weight, bias)(normed)
            attended = made.paged_attention(made.rope_and_write_kv(qkv, kv, plan), kv, plan)
            gated = made.gated_linear(weight, weight, None, None)(normed)
            results.append((attended, gated))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-2)
        assert isinstance(plan, CpuPlan) == (inputs.num_tokens >= 33)


def test_what_is_no_number_stays_none_and_the_largest_becomes_infinite():
    x = torch.tensor([[float("nan"), 1.0], [3e38, 3e38], [-3e38, -3e38]]).to(BF16)
    got = native().linear(torch.ones(1, 2).to(BF16), None)(x)[:, 0]
    assert got[0].isnan()
    assert got[1:].tolist() == [float("inf"), float("-inf")]


def test_results_do_not_depend_on_the_number_of_threads_or_on_other_engines():
    torch.manual_seed(3)
    x, weight = torch.randn(33, 576).to(BF16), torch.randn(960, 576).to(BF16)
    linears = [native(threads=threads).linear(weight, None) for threads in (1, 2, 5, 3)]
    expected = linears[0](x)
    wrong: list[int] = []

    def call(index: int) -> None:
        wrong.extend(index for _ in range(200) if not torch.equal(linears[index](x), expected))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(linears))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No library yet, and an empty cache."""
    build.load_library.cache_clear()
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    yield tmp_path
    build.load_library.cache_clear()


def _compiler(folder: Path, body: str) -> str:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("body", ["echo broken >&2; exit 1", "exit 0"])
def test_a_compiler_that_fails_leaves_the_engine_without(fresh, monkeypatch, caplog, body):
    monkeypatch.setenv("CXX", _compiler(fresh, body))
    assert build.load_library() is None
    assert "native kernels not built" in caplog.text
    assert ("broken" in caplog.text) == ("broken" in body)


def test_without_a_compiler_or_when_switched_off_there_is_none(fresh, monkeypatch):
    monkeypatch.setenv("CXX", str(fresh / "nowhere"))
    assert build.load_library() is None
    build.load_library.cache_clear()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.load_library() is None
    assert os.listdir(fresh) == []
