"""The decoder against transformers, logits and KV, whole and split over ranks."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import StepBatch
from engine.model.families import load_model_config
from engine.model.sharding import allowed_degrees
from tests.support.engine import ThreadedRanks, chunk, hf_logits, logits_of, prompt, whole_runner
from tests.support.tiny import save_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 past its original length": {"rope_parameters": LLAMA3},
    "odd vocabulary, tied": {"vocab_size": 131, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads as queries, odd MLP": {"num_key_value_heads": 4, "intermediate_size": 71},
    "three KV heads of three queries": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 100,
    },
}


def randomise_biases(folder) -> None:
    """transformers starts biases at zero; give them values."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(params=list(SHAPES), scope="module")
def shape(request, tmp_path_factory):
    """(path, ids, transformers' logits of every position) of one shape."""
    folder = tmp_path_factory.mktemp("shape")
    path = save_tiny_llama(folder, **SHAPES[request.param])
    randomise_biases(folder)
    ids = prompt(90)
    return path, ids, hf_logits(path, ids)


def in_chunks(run, ids, sizes, blocks):
    """Logits of the last position of every chunk."""
    found, start = [], 0
    for size in sizes:
        step = chunk(ids[start : start + size], start, blocks)
        found.append(run(StepBatch(sequences=(step,)))[0])
        start += size
    return torch.stack(found)


CHUNKS = [
    [90],
    [1] * 20,
    [7, 1, 8, 16, 25, 1, 1, 31],
    [8, 8, 24, 50],
]


@pytest.mark.parametrize("sizes", CHUNKS, ids=["whole", "tokens", "mixed", "blocks"])
def test_logits_equal_transformers_however_the_prompt_is_cut(shape, sizes):
    path, ids, expected = shape
    runner = whole_runner(path)
    blocks = [5, 3, 60, 7, 8, 9, 10, 11, 0, 1, 2, 40]
    found = in_chunks(lambda batch: logits_of(runner, batch), ids, sizes, blocks)
    ends = torch.tensor(sizes).cumsum(0) - 1
    torch.testing.assert_close(found, expected[ends], rtol=2e-4, atol=2e-4)


def test_every_degree_gives_the_same_logits_and_its_share_of_the_kv(shape):
    path, ids, expected = shape
    whole = whole_runner(path)
    blocks, sizes = list(range(12)), [40, 1, 49]
    in_chunks(lambda batch: logits_of(whole, batch), ids, sizes, blocks)
    degrees = [size for size in allowed_degrees(load_model_config(path)) if 1 < size <= 4]
    assert degrees
    for size in degrees:
        with ThreadedRanks(path, size) as ranks:
            found = in_chunks(ranks.logits, ids, sizes, blocks)
            torch.testing.assert_close(found, expected[[39, 40, 89]], rtol=2e-4, atol=2e-4)
            for runner, heads in zip(ranks.runners, ranks.layout.rank_heads, strict=True):
                share = whole.pool.data[:, :, :, heads[0] : heads[1]]
                torch.testing.assert_close(runner.pool.data, share, rtol=1e-3, atol=1e-4)


def test_a_mixed_step_gives_each_sequence_its_own_logits(tiny):
    prompts = [prompt(length, seed=3) for length in (20, 9, 33)]
    whole = [hf_logits(tiny, ids) for ids in prompts]
    runner = whole_runner(tiny)
    tables = [[0, 1, 2], [30, 31], [12, 10, 8, 6, 4]]
    first = StepBatch(
        sequences=(
            chunk(prompts[0][:19], 0, tables[0], None),
            chunk(prompts[1][:8], 0, tables[1], None),
            chunk(prompts[2][:5], 0, tables[2], None),
        )
    )
    assert logits_of(runner, first) is None
    second = StepBatch(
        sequences=(
            chunk(prompts[2][5:], 5, tables[2]),
            chunk(prompts[0][19:], 19, tables[0]),
            chunk(prompts[1][8:], 8, tables[1]),
        )
    )
    found = logits_of(runner, second)  # rows: the decodes, longest first, then the chunk
    expected = torch.stack([whole[0][-1], whole[1][-1], whole[2][-1]])
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_bfloat16_stays_near_float32(tiny):
    ids = prompt(60)
    expected = hf_logits(tiny, ids)[-1]
    step = StepBatch(sequences=(chunk(ids, 0, range(8)),))
    found = logits_of(whole_runner(tiny, dtype="bfloat16"), step)[0].float()
    assert (found - expected).abs().max() < 0.06 * expected.abs().max()


def test_padding_rows_of_the_vocabulary_never_come_out(tmp_path):
    path = save_tiny_llama(tmp_path, vocab_size=131)
    step = StepBatch(sequences=(chunk(prompt(10), 0, [0, 1]),))
    with ThreadedRanks(path, 4) as ranks:
        assert ranks.logits(step).shape == (1, 131)
