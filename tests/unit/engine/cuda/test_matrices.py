"""Matrices of every checkpoint format in the forms that the GPU's kernels multiply."""

from pathlib import Path

import pytest
import torch

from engine.cuda.products.matrices import device_matrix
from engine.kernels.triton.coded import CodedWeight
from engine.model.checkpoint import Checkpoint
from engine.model.families import load_model_config
from engine.model.matrices import matrix_reader
from engine.model.sharding import share_of
from engine.model.weights import WeightLoader
from engine.quantization.weight import Encoding, QuantizedWeight, dense
from tests.support.packing import PACKINGS, pack_checkpoint
from tests.support.rounded_steps import numbers_of
from tests.support.tiny import save_tiny_llama

SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
}
#: Blocks of 32 columns, eight bits and columns by importance have no kernels.
NUMBERS = {"fp8-blocks", "int8", "int8-zeros", "w8a16", "gptq-int8", "w4a16-ordered"}
NUMBERS |= {"gptq-ordered"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Path(save_tiny_llama(tmp_path_factory.mktemp("plain"), **SIZES))


@pytest.mark.parametrize("name", PACKINGS)
def test_forms_of_checkpoints(plain, tmp_path, name):
    pack_checkpoint(plain, tmp_path / "packed", tmp_path / "reference", PACKINGS[name])
    config = load_model_config(tmp_path / "packed")
    source = Checkpoint(tmp_path / "packed", torch.float32)
    matrices = matrix_reader(source, config, None, torch.float32)
    loader = WeightLoader(config, share_of(config, 0, 1), source, torch.device("cpu"), matrices)
    layer = loader.layer(1)
    for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
        matrix = device_matrix(weight)
        if name in NUMBERS:
            assert matrix.equal(dense(weight))
            continue
        assert isinstance(matrix, CodedWeight)
        assert matrix.shape == weight.shape
        torch.testing.assert_close(numbers_of(matrix), dense(weight), rtol=2.0**-11, atol=1e-9)


@pytest.mark.parametrize("first", [0, 96])
def test_blocks(first):
    """Scales of blocks that a slice cuts belong to rows; the library does not multiply those."""
    whole = QuantizedWeight(
        encoding=Encoding.FP8,
        codes=torch.randn(512, 512).mul(50.0).to(torch.float8_e4m3fn),
        scales=torch.rand(4, 4),
        group_size=128,
        row_block=128,
        num_inputs=512,
        dtype=torch.float32,
        quantizes_input=True,
    )
    weight = whole if first == 0 else whole.split_rows(first)[1].split_rows(128)[0]
    matrix = device_matrix(weight)
    assert isinstance(matrix, CodedWeight)
    assert matrix.by_block == (first == 0)
    torch.testing.assert_close(numbers_of(matrix), dense(weight))
