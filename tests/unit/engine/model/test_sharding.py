"""How a model is split over ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelRefused
from engine.model.config import ModelConfig
from engine.model.families import parse_model_config
from engine.model.sharding import allowed_degrees, rank_heads, share_of


def model(heads: int, kv_heads: int, vocab: int = 128, intermediate: int = 96) -> ModelConfig:
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": heads * 4,
            "head_dim": 4,
            "intermediate_size": intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
        }
    )


MODELS = st.builds(
    lambda kv, group, vocab, columns: model(kv * group, kv, vocab, columns),
    kv=st.integers(1, 9),
    group=st.integers(1, 8),
    vocab=st.integers(1, 300),
    columns=st.integers(1, 200),
)


@given(MODELS, st.data())
def test_ranks_cover_everything_once(config, data):
    size = data.draw(st.sampled_from(allowed_degrees(config)))
    shares = [share_of(config, rank, size) for rank in range(size)]
    for part, total in (("q_heads", config.num_heads), ("intermediate", config.intermediate_size)):
        spans = [getattr(share, part) for share in shares]
        assert spans[0][0] == 0
        assert spans[-1][1] == total
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    tokens = [token for share in shares for token in range(*share.vocab)]
    assert tokens == list(range(config.vocab_size))
    assert len({share.vocab_rows for share in shares}) == 1
    assert shares[0].vocab_rows * size >= config.vocab_size


@given(MODELS, st.data())
def test_every_query_head_finds_its_kv_head_on_its_rank(config, data):
    size = data.draw(st.sampled_from(allowed_degrees(config)))
    for rank in range(size):
        share = share_of(config, rank, size)
        assert share.num_q_heads % share.num_kv_heads == 0
        group = share.num_q_heads // share.num_kv_heads
        for index, head in enumerate(range(*share.q_heads)):
            local_kv = index // group
            assert share.kv_heads[0] + local_kv == head // config.group_size


def test_smollm2_has_its_degrees_named():
    smollm2 = model(9, 3)
    assert allowed_degrees(smollm2) == (1, 2, 3, 9)
    assert rank_heads(smollm2, 3) == ((0, 1), (1, 2), (2, 3))
    assert rank_heads(smollm2, 2) == ((0, 1), (1, 3))
    with pytest.raises(ModelRefused, match="allowed: 1, 2, 3, 9") as caught:
        share_of(smollm2, 0, 4)
    assert caught.value.param == "tp_size"


def test_kv_heads_are_replicated_when_ranks_outnumber_them():
    assert rank_heads(model(8, 2), 4) == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert share_of(model(8, 2), 3, 4).q_heads == (6, 8)
    assert allowed_degrees(model(32, 8)) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)


def test_a_vocabulary_smaller_than_the_ranks_leaves_some_empty():
    share = share_of(model(8, 8, vocab=9), 7, 8)
    assert share.vocab == (9, 9)
    assert share.vocab_rows == 2
