"""Decode steps on the split kernel compute what they do with torch's products and norms."""

from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.cuda.options import CudaOptions
from engine.cuda.products.single import SplitProducts
from engine.cuda.products.split_decode import SplitDecode
from engine.cuda.runner import CudaRunner
from engine.kernels.triton import split_linear
from tests.support.cuda import HostSource, tiny_config

pytestmark = pytest.mark.usefixtures("few_programs")

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def split_decode(runner):
    products = SplitProducts(runner.weights, 64, runner.device, pdl=False)
    return SplitDecode(runner.weights, 1e-5, products, pdl=False)


@pytest.mark.parametrize("bias", [False, True])
def test_a_step_on_split_products_gives_the_same_logits(device, monkeypatch, bias):
    monkeypatch.setattr(split_linear, "_FEW", (32, 32))
    name = str(HALF).removeprefix("torch.")
    runner = CudaRunner(
        EngineConfig(model_path="unused", dtype=name, device=str(device)),
        tiny_config(attention_bias=bias, vocab_size=224),
        HostSource(device, HALF),
        CudaOptions(max_batch=4),
    )
    split = split_decode(runner)
    assert [split.serves(rows) for rows in (1, 2, 64, 65)] == [False, True, True, False]
    h = torch.randn(3, 96, device=device).to(HALF)
    width = runner.model._shape.num_heads * runner.model._shape.head_dim

    class Attention:
        written = 0

        def write_kv(self, layer, qkv):
            self.written += 1

        def check(self, x):
            self.checked = x.shape

        def attend(self, layer, qkv):
            return torch.tanh(qkv[:, :width] + layer)

    attention = Attention()
    want = runner.model.logits(runner.model.hidden(h.clone(), attention))
    got = split.logits(h, attention, torch.empty_like(want))
    assert attention.written == 2 * len(runner.weights.layers)
    assert (got.double() - want.double()).norm() / want.double().norm() < 2e-2


def test_a_gated_product_of_more_rows(device, monkeypatch):
    monkeypatch.setattr(split_linear, "_FEW", (32, 32))
    monkeypatch.setattr(split_linear, "_MANY", (32, 32))
    name = str(HALF).removeprefix("torch.")
    runner = CudaRunner(
        EngineConfig(model_path="unused", dtype=name, device=str(device)),
        tiny_config(vocab_size=224),
        HostSource(device, HALF),
        CudaOptions(max_batch=4),
    )
    split = split_decode(runner)
    assert [split.gates(rows) for rows in (64, 65, 128, 129)] == [False, True, True, False]
    x = torch.randn(70, 96, device=device).to(HALF)
    weight = runner.weights.layers[0].gate_up
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    assert (split.gated(x, weight).double() - want).norm() / want.norm() < 1e-2


def test_sizes_that_no_tile_divides_stay_with_torch(device):
    runner = CudaRunner(
        EngineConfig(model_path="unused", dtype="float32", device=str(device)),
        tiny_config(),
        HostSource(device),
        CudaOptions(max_batch=4),
    )
    assert not split_decode(runner).serves(32)


@pytest.mark.parametrize(("shared", "serves"), [(232_448, True), (166_912, True), (101_376, False)])
def test_a_card_with_too_little_shared_memory_stays_with_torch(device, monkeypatch, shared, serves):
    """They are those of an H100, an A100 and a desktop's card."""
    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": shared})
    monkeypatch.setattr(
        split_linear, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils))
    )
    assert split_linear.fits(torch.device("cuda", 0)) is serves
    monkeypatch.setattr(split_linear, "_FEW", (32, 32))
    monkeypatch.setattr(split_linear, "_MANY", (32, 32))
    monkeypatch.setattr("engine.cuda.products.single.fits", lambda device: serves)
    runner = CudaRunner(
        EngineConfig(model_path="unused", dtype="float32", device=str(device)),
        tiny_config(vocab_size=224),
        HostSource(device),
        CudaOptions(max_batch=4),
    )
    split = split_decode(runner)
    assert split.serves(32) is serves
    assert split.gates(100) is serves
