"""How layers are cut into KV groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.model.config import LayerConfig, ModelConfig
from engine.model.families import load_model_config
from engine.model.kv_groups import group_layers
from protocol.kv_layout import ONE_GROUP, KVGroup
from tests.support.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    return load_model_config(save_tiny_llama(tmp_path_factory.mktemp("tiny")))


def with_layers(model: ModelConfig, windows: list[int | None]) -> ModelConfig:
    return replace(model, layers=tuple(LayerConfig(rope=None, window=w) for w in windows))


@pytest.mark.parametrize(
    ("num_layers", "period", "depth", "sizes"),
    [
        (18, 6, 3, [None] * 6),  # Gemma 3 270M
        (26, 6, 4, [None] * 5 + [3] * 2),  # 1B
        (34, 6, 5, [None] * 6 + [4]),  # 4B
        (48, 6, 8, [None] * 6),  # 12B
        (62, 6, 10, [None] + [9] * 4 + [8] * 2),  # 27B
        (26, 2, 13, [None] * 2),  # Gemma 2 2B
    ],
)
def test_models_with_windows(model, num_layers, period, depth, sizes):
    windows = [512 if (layer + 1) % period else None for layer in range(num_layers)]
    found = group_layers(with_layers(model, windows), 8192)
    assert found.depth == depth
    assert [group.num_layers for group in found.groups] == sizes
    assert found.groups[0].window is None
    assert len(set(found.places)) == num_layers
    for window, (group, slot) in zip(windows, found.places, strict=True):
        assert found.groups[group].window == window
        assert slot < (found.groups[group].num_layers or depth)


def test_slots_fill_up_one_after_another(model):
    """So that a hand-off can follow a step layer by layer, as without windows."""
    windows = [512 if (layer + 1) % 6 else None for layer in range(48)]
    filled = group_layers(with_layers(model, windows), 8192).filled()
    assert [slot for slots in filled for slot in slots] == list(range(8))
    assert [layer for layer, slots in enumerate(filled) if slots] == list(range(5, 48, 6))
    plain = group_layers(with_layers(model, [None] * 7), 8192)
    assert plain.filled() == tuple(range(layer, layer + 1) for layer in range(7))


def test_layers_of_one_kind_are_one_group(model):
    assert group_layers(with_layers(model, [None] * 7), 8192).groups == ONE_GROUP
    assert group_layers(with_layers(model, [512, None]), 512).groups == ONE_GROUP
    windowed = group_layers(with_layers(model, [512] * 7), 8192)
    assert (windowed.depth, windowed.groups) == (7, (KVGroup(window=512),))


def test_a_single_odd_layer_does_not_cut_the_model_to_pieces(model):
    found = group_layers(with_layers(model, [None] * 27 + [512]), 8192)
    assert (found.depth, len(found.groups)) == (9, 4)
