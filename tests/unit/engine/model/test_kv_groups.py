"""How layers are cut into KV groups."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.kernels.base import KVPlace
from engine.kv.sizing import block_bytes, kv_layout
from engine.model.config import LayerConfig, ModelConfig
from engine.model.families import load_model_config, parse_model_config
from engine.model.kv_groups import KVPlanes, group_layers
from engine.model.sharding import allowed_degrees
from protocol.kv_layout import ONE_GROUP, KVGroup
from tests.support.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    return load_model_config(save_tiny_llama(tmp_path_factory.mktemp("tiny")))


#: Any model; its layers are replaced.
ONE = parse_model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 9,
        "num_hidden_layers": 1,
    }
)


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


def mixed(model: ModelConfig, shapes: list[tuple[int, int]], window: int = 512) -> ModelConfig:
    """Layers of the first shape have a window."""
    layers = tuple(
        LayerConfig(
            rope=None,
            window=window if shape == shapes[0] else None,
            num_kv_heads=shape[0],
            head_dim=shape[1],
        )
        for shape in shapes
    )
    heads = math.lcm(*(heads for heads, _ in shapes))
    return replace(model, num_heads=heads, layers=layers)


def test_gemma_4_31b(model):
    """Two layers that attend to everything share a slot: half as many heads of twice the size."""
    shapes = [(16, 256) if (layer + 1) % 6 else (4, 512) for layer in range(60)]
    found = group_layers(mixed(model, shapes), 8192)
    assert found.planes == KVPlanes(count=16, plane_dim=256)
    assert found.depth == 5
    assert found.groups[0] == KVGroup(num_kv_heads=4, head_dim=512)
    assert set(found.groups[1:]) == {KVGroup(window=512, num_kv_heads=16, head_dim=256)}
    assert len(found.groups) == 11
    assert [found.parts[layer] for layer in range(5, 60, 6)] == [0, 1] * 5
    assert allowed_degrees(mixed(model, shapes)) == (1, 2, 4)


@given(
    st.lists(
        st.tuples(st.sampled_from((1, 2, 3, 4, 8)), st.sampled_from((16, 24, 32, 64))),
        min_size=2,
        max_size=9,
    )
)
def test_layers_of_several_shapes_share_no_place(shapes):
    """On no rank: neither a plane of a slot of a block of the same group, nor one beyond it."""
    model = mixed(ONE, shapes)
    found = group_layers(model, 8192)
    for size in allowed_degrees(model) if len(set(shapes)) > 1 else (1,):
        taken = set()
        for layer, (heads, dim) in enumerate(shapes):
            place = KVPlace(
                num_kv_heads=heads // size,
                head_dim=dim,
                num_planes=found.planes.count // size,
                plane_dim=found.planes.plane_dim,
                part=found.parts[layer],
            )
            planes = place.planes().flatten().tolist()
            assert len(planes) * place.plane_dim == 2 * heads // size * dim
            assert max(planes) < 2 * place.num_planes
            for plane in planes:
                assert (*found.places[layer], plane) not in taken
                taken.add((*found.places[layer], plane))
        for layer, (group, slot) in enumerate(found.places):
            assert slot < (found.groups[group].num_layers or found.depth)
            assert found.groups[group].num_kv_heads in (None, shapes[layer][0])


def test_blocks_of_several_shapes_have_the_bytes_of_their_planes(model):
    shapes = [(8, 16), (2, 32), (8, 16), (2, 32)]
    config = EngineConfig(model_path="unused", dtype="float32", tp_size=2)
    layout = kv_layout(config, mixed(model, shapes), 3)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (1, 8, 16)
    assert layout.rank_heads == ((0, 4), (4, 8))
    assert block_bytes(config, mixed(model, shapes)) == 2 * 4 * 16 * 16 * 4
    with pytest.raises(ModelRefused, match="allowed: 1, 2"):
        kv_layout(replace(config, tp_size=4), mixed(model, shapes), 3)
