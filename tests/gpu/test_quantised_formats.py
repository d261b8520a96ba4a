"""Quantised checkpoints read straight to a GPU are to the bit what they are on the CPU."""

from pathlib import Path

import pytest
import torch

from engine.config import Quantization
from engine.model.checkpoint import Checkpoint
from engine.model.families import load_model_config
from engine.model.matrices import matrix_reader
from engine.model.sharding import share_of
from engine.model.weights import WeightLoader
from engine.quantization.at_load import quantise
from engine.quantization.weight import dense
from tests.support.packing import PACKINGS, pack_checkpoint
from tests.support.tiny import save_tiny_llama


def loader(folder: Path, device: torch.device, rank: int, size: int) -> WeightLoader:
    config = load_model_config(folder)
    source = Checkpoint(folder, torch.float32, device)
    matrices = matrix_reader(source, config, None, torch.float32)
    return WeightLoader(config, share_of(config, rank, size), source, device, matrices)


@pytest.mark.parametrize("name", PACKINGS)
def test_matrices_of_every_format(tmp_path, device, name) -> None:
    sizes = {"hidden_size": 72, "head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
    plain = Path(save_tiny_llama(tmp_path / "plain", **sizes, intermediate_size=88))
    pack_checkpoint(plain, tmp_path / "packed", tmp_path / "reference", PACKINGS[name])
    for rank, size in ((0, 1), (1, 2)):
        ours = loader(tmp_path / "packed", device, rank, size).layer(1)
        theirs = loader(tmp_path / "reference", torch.device("cpu"), rank, size).layer(1)
        for part in ("qkv", "out", "gate_up", "down"):
            weight = getattr(ours, part)
            assert weight.device == device
            assert dense(weight).cpu().equal(getattr(theirs, part)), part


@pytest.mark.parametrize("kind", Quantization)
def test_quantising_at_load(device, kind) -> None:
    matrix = torch.randn(96, 333).bfloat16()
    there = quantise(matrix.to(device), kind, (50, 300))
    here = quantise(matrix, kind, (50, 300))
    step = here.scales.float().max()
    # A quotient that lies between two codes may round either way.
    assert (there.dequantise().cpu().float() - here.dequantise().float()).abs().max() <= step * 32
    codes = [w.codes.view(torch.uint8).cpu().short() for w in (there, here)]
    assert (codes[0] != codes[1]).float().mean() < 0.001
