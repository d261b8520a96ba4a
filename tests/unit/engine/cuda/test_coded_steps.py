"""Steps over weights in codes, against the same model with the numbers that the codes stand for.

Where inputs stay as they are, a step may differ from the exact one, in float64 over the same codes,
only by rounding activations to the model's type. How far such roundings lead is computed, not
chosen: `tests.support.rounded_steps` rounds in the same places as the kernels. Its roundings are
one draw and those of the kernels another (the order of float32 sums decides numbers near the middle
between two, and each that falls to the other side moves more of them in what follows), so that both
are equally far from the exact step within what a draw of some hundred numbers varies.

An engine with dequantised weights is no such reference: it rounds the weights, too, and in other
places. That made logits of bfloat16 differ by 0.006 to 0.008 of their norm.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from engine.batch import StepBatch
from engine.config import EngineConfig, Quantization
from engine.cuda.attention import DecodeAttention
from engine.cuda.comm import RankCollectives
from engine.cuda.options import CudaOptions
from engine.cuda.products.matrices import device_matrix
from engine.cuda.runner import CudaRunner
from engine.cuda.staging import GraphSet
from engine.kernels.triton import codes
from engine.kernels.triton.coded import CodedWeight
from engine.quantization.at_load import quantise
from tests.support.cuda import HostSource, seq, tiny_config
from tests.support.rounded_steps import Places, rounded_logits

pytestmark = pytest.mark.usefixtures("few_programs")

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
#: How much larger one draw of roundings may be than another.
ANOTHER_DRAW = 1.5
#: Of HALF, in the last place.
HALF_A_UNIT = torch.finfo(HALF).eps / 2
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


class Attention:
    """Anything that depends on every projected row."""

    def __init__(self, width):
        self.width = width

    def write_kv(self, layer, qkv):
        pass

    def check(self, h):
        pass

    def attend(self, layer, qkv):
        return torch.tanh(qkv[:, : self.width] + layer)


def make_runner(device, quantization, *, coded=True, monkeypatch=None, **changes):
    if not coded:
        monkeypatch.setattr("engine.cuda.runner.multiplies_codes", lambda dtype, device: False)
    runner = CudaRunner(
        EngineConfig(
            model_path="unused",
            dtype=str(HALF).removeprefix("torch."),
            device=str(device),
            quantization=quantization,
        ),
        tiny_config(**SIZES | changes),
        HostSource(device, HALF),
        CudaOptions(max_batch=8, max_chunk_tokens=128),
    )
    monkeypatch.undo()
    return runner


def embedded(runner, rows):
    """The hidden states that a step begins with."""
    noise = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
    return noise.to(runner.device, HALF)


def logits(runner, rows, attention):
    """Of one step from given hidden states, by the path that steps of so many rows take."""
    device, h = runner.device, embedded(runner, rows)
    runner.model.embed = lambda *args: h
    out = h.new_empty(rows, runner.weights.head.shape[0])
    none = torch.zeros(rows, dtype=torch.int32, device=device)
    return runner.model.logits_of_step(none, none, none, attention, out).double()


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 256), (3, 203), (17, 256), (70, 203)])
@pytest.mark.parametrize(("quantization", "error"), [("fp8", 0.08), ("int4", 0.08)])
def test_steps_of_any_rows(device, monkeypatch, rows, vocab_size, quantization, error):
    """The error is that of inputs in e4m3, none where these stay as they are."""
    changes = {"vocab_size": vocab_size, "monkeypatch": monkeypatch}
    monkeypatch.setattr(CudaRunner, "_bytes_beside_kv", lambda self: 0)  # no copies of pairs
    runner = make_runner(device, quantization, **changes)
    layer = runner.weights.layers[0]
    forms = [type(x) for x in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert forms == [CodedWeight] * 4
    assert runner.model._split.serves(8) == (vocab_size == 256)
    width = runner.model._shape.num_heads * runner.model._shape.head_dim
    got = logits(runner, rows, Attention(width))
    assert torch.isfinite(got).all()
    if rows == 1 or (quantization == "int4" and rows <= 64):
        few = Places.FEW if vocab_size == 256 else Places.SINGLE
        h, places = embedded(runner, rows), Places.ROW if rows == 1 else few
        step = (runner.weights, h, Attention(width), 1e-5)
        exact, rounded = (rounded_logits(*step, x) for x in (Places.NOWHERE, places))
        assert (got - exact).norm() < ANOTHER_DRAW * (rounded - exact).norm()
        return
    plain = make_runner(device, quantization, coded=False, **changes)
    want = logits(plain, rows, Attention(width))
    assert (got - want).norm() / want.norm() < error


@pytest.mark.parametrize("rows", [17, 70])
def test_copies_of_pairs(device, monkeypatch, rows):
    """Where e4m3 copies are kept, many rows give the same numbers as with those made anew, and
    dozens those of the copies' matrices as FP8 weights."""
    monkeypatch.setattr(CudaRunner, "_bytes_beside_kv", lambda self: 1 << 40)
    runner = make_runner(device, "int4", monkeypatch=monkeypatch, vocab_size=256)
    got = logits(runner, rows, Attention(128))

    def other(matrix):
        if not isinstance(matrix, CodedWeight) or not matrix.paired:
            return matrix
        return matrix.channels if rows == 17 else replace(matrix, channels=None)

    runner.weights = runner.weights.formed(other)
    runner.model = runner._make_model(RankCollectives())
    assert torch.equal(logits(runner, rows, Attention(128)), got)


@pytest.mark.parametrize(("rows", "error"), [(1, 0.01), (3, 0.01), (17, 0.01), (40, 0.0)])
def test_the_head_in_bytes(device, monkeypatch, rows, error):
    """Steps of few rows multiply with its codes, whose error is that of 8 bits; others with its
    numbers."""
    monkeypatch.setattr(CudaRunner, "_bytes_beside_kv", lambda self: 1 << 40)
    runner = make_runner(device, "fp8", monkeypatch=monkeypatch, vocab_size=256)
    got = logits(runner, rows, Attention(128))
    assert runner.weights.head.codes.dtype is torch.int8
    runner.weights = replace(runner.weights, head=runner.weights.head.numbers)
    runner.model = runner._make_model(RankCollectives())
    want = logits(runner, rows, Attention(128))
    assert (got - want).norm() / want.norm() <= error
    assert error == 0.0 or not torch.equal(got, want)


class TwoRanks(RankCollectives):
    """Rank 0 of two whose other sends nothing: sums pass through a buffer."""

    def __init__(self):
        super().__init__(0, 2)
        self.sums = 0

    def partial(self, h):
        return torch.full_like(h, float("nan"))

    def reduce(self, partial, h):
        self.sums += 1
        h.copy_(partial)


@pytest.mark.parametrize(("rows", "quantization"), [(1, "int4"), (3, "fp8"), (70, "fp8")])
def test_sums_over_ranks(device, monkeypatch, rows, quantization):
    runner = make_runner(device, quantization, monkeypatch=monkeypatch)
    runner.model._split, runner.model._coded_steps._sums = None, False  # as with several ranks
    attention = Attention(128)
    want = logits(runner, rows, attention)
    runner.model.comm = comm = TwoRanks()
    got = logits(runner, rows, attention)
    assert comm.sums == 2 * len(runner.weights.layers)
    assert (got - want).norm() / want.norm() < HALF_A_UNIT


def test_a_prompt_and_decode_rows_over_the_pool(device, monkeypatch):
    """The logits of the plain model, and the ids that are best of them."""
    first, steps = None, []
    for coded in (True, False):
        monkeypatch.setattr(CudaRunner, "_bytes_beside_kv", lambda self: 0)  # no copies
        runner = make_runner(device, "int4", coded=coded, monkeypatch=monkeypatch, vocab_size=256)
        runner.open(24)
        runner.start()
        forward, found = runner._forward, []

        def kept(plan, forward=forward, found=found):
            logits, hidden = forward(plan)
            found.append(logits[: len(plan.sampled)].double())
            return logits, hidden

        monkeypatch.setattr(runner, "_forward", kept)
        prompt = seq([5 * i % 200 for i in range(20)], 0, (3, 4))
        ids = [runner.run(StepBatch(sequences=(prompt,))).tokens]
        first = first or ids[0]
        rows = (seq(first, 20, (3, 4)), seq((9,), 0, (7,)))
        ids.append(runner.run(StepBatch(sequences=rows)).tokens)
        assert [tuple(step.argmax(1).tolist()) for step in found] == ids
        steps.append(found)
    for got, want in zip(*steps, strict=True):
        assert (got - want).norm() / want.norm() < 3 * torch.finfo(HALF).eps


def test_attention_leaves_the_codes_of_its_product(device, monkeypatch):
    """Without a kernel that makes them: the first norm's remains. Numbers were rounded before."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    runner = make_runner(device, "fp8", monkeypatch=monkeypatch, vocab_size=256, **heads)
    runner.open(24)
    runner.start()
    count, steps, forward = mock.Mock(side_effect=codes.row_codes), [], runner._forward
    monkeypatch.setattr("engine.cuda.products.single.row_codes", count)
    monkeypatch.setattr(GraphSet, "run", lambda self, shape: self._run(shape))
    rows = (seq((9,), 0, (3,)), seq((8,), 0, (7,)))
    for leaves in (True, False):
        if not leaves:
            monkeypatch.setattr(DecodeAttention, "leave_codes", lambda *args: False)
        plan = runner.prepare(StepBatch(sequences=rows))
        steps.append(forward(plan)[0][:2].double())
        assert count.call_count == (0 if leaves else len(runner.weights.layers))
    assert torch.isfinite(steps[0]).all()
    assert (steps[0] - steps[1]).norm() / steps[1].norm() < 0.02


@pytest.mark.parametrize(
    ("n", "k", "columns"), [(96, 256, None), (128, 200, None), (128, 512, (32, 288))]
)
@pytest.mark.parametrize("kind", list(Quantization))
def test_sizes_that_no_kernel_takes_become_numbers(n, k, columns, kind):
    weight = quantise(torch.randn(n, k).half(), kind, columns)
    matrix = device_matrix(weight)
    pairs = kind is Quantization.INT4 and columns is not None
    if pairs or (kind is Quantization.FP8 and columns is not None):
        assert isinstance(matrix, CodedWeight)
    else:
        assert torch.equal(matrix, weight.dequantise())
