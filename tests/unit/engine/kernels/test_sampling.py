"""Sampling: what filters keep, what the noise is, and that no row depends on another."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.kernels import sampling
from engine.kernels.sampling import (
    SamplingInputs,
    TokenMasks,
    argmax,
    gumbel_noise,
    mask_bytes,
    noise_key,
    sample,
)
from protocol.sampling import SamplingParams

VOCAB = 5000  # many times what the short sort looks at


def logits_for(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@given(st.integers(1, 5), st.sampled_from([1, 3, 255, 256, 257, 1000, 1024]), st.integers(0, 50))
def test_argmax_takes_the_first_of_the_highest(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 4 + 200 * (seed % 2), (rows, width), generator=generator).float()
    x[0, : width // 2] = -torch.inf
    first = [row.index(max(row)) for row in x.tolist()]
    assert argmax(x).tolist() == argmax(x.bfloat16()).tolist() == first


def draw(logits, params, positions=None, banned=None, allowed=()):
    positions = positions or [7] * len(params)
    inputs = SamplingInputs.build(params, positions, banned or [()] * len(params), allowed=allowed)
    return sample(logits.clone(), inputs).tolist()


def kept_by_hand(logits, params) -> set[int]:
    """The filters written out for one row, with a full sort."""
    scaled = (logits / params.temperature).double()
    order = scaled.argsort(descending=True).tolist()
    if params.top_k:
        order = order[: params.top_k]
    probabilities = scaled[order].softmax(0).tolist()
    kept, mass = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if params.top_p < 1.0 and mass >= params.top_p:
            break
        kept.append(token)
        mass += probability
    floor = float(scaled.max()) + (math.log(params.min_p) if params.min_p else -math.inf)
    return {token for token in kept if float(scaled[token]) >= floor}


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 270, 4500, 9000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-4, 0.5, 0.95, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(0, 1000), st.integers(0, 100_000))
def test_a_row_gives_the_same_token_alone_and_in_any_batch(params, seed, position):
    logits = logits_for(len(params), seed)
    positions = [position + row for row in range(len(params))]
    together = draw(logits, params, positions)
    alone = [
        draw(logits[row : row + 1], [params[row]], [positions[row]])[0]
        for row in range(len(params))
    ]
    assert together == alone


@given(PARAMS, st.integers(0, 1000))
def test_only_tokens_that_the_filters_keep_are_sampled(params, seed):
    logits = logits_for(1, seed)[0]
    token = draw(logits[None], [params])[0]
    if params.greedy:
        assert token == int(logits.argmax())
    else:
        assert token in kept_by_hand(logits, params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.2, top_k=12, top_p=0.9, min_p=0.02),
    ],
)
def test_frequencies_are_those_of_the_filtered_softmax(params):
    logits = logits_for(1, seed=5, vocab=16, scale=1.0)[0]
    kept = sorted(kept_by_hand(logits, params))
    expected = torch.zeros(16)
    expected[kept] = (logits[kept] / params.temperature).softmax(0)
    draws = 6000
    inputs = SamplingInputs.build([params] * draws, range(draws), [()] * draws)
    tokens = sample(logits.repeat(draws, 1), inputs)
    found = torch.bincount(tokens, minlength=16) / draws
    spread = (expected * (1 - expected) / draws).sqrt()
    assert ((found - expected).abs() <= 4.5 * spread + 1e-9).all()


@given(
    st.integers(1, 4),
    st.floats(1e-4, 0.99999),
    st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    st.integers(0, 99),
)
def test_a_long_nucleus_is_the_one_a_full_sort_finds(rows, top_p, scale, seed):
    logits = logits_for(rows, seed, scale=scale)
    logits[:, ::7] = logits[:, :1]  # ties
    logits[0, 5] = -torch.inf
    found = sampling._nucleus_floor(logits, torch.full((rows,), top_p))
    for row in range(rows):
        ordered = logits[row].double().sort(descending=True).values
        weights = (ordered - ordered[0]).exp()
        before = weights.cumsum(0) - weights
        share = float(torch.tensor(top_p)) * float(weights.sum())
        kept = before < share
        at = int(kept.sum()) - 1
        near = {float(v) for v in ordered[max(at - 1, 0) : at + 2]}
        assert float(found[row]) in near
        if abs(float(before[at]) - share) > 1e-6 * share:
            assert float(found[row]) == float(ordered[at])


def test_noise_is_gumbel_and_never_infinite():
    keys = torch.tensor([noise_key(seed, 3) for seed in range(40)], dtype=torch.int32)
    noise = gumbel_noise(keys, torch.arange(5000, dtype=torch.int32))
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    correlation = torch.corrcoef(noise[:8])
    assert (correlation - torch.eye(8)).abs().max() < 0.06
    along_tokens = torch.corrcoef(torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten())))
    assert along_tokens[0, 1].abs() < 0.01


def test_noise_is_the_hash_written_out_in_integers():
    def mix(x, key=None):
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        if key is not None:
            x ^= key & 0xFFFFFFFF
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return x ^ (x >> 16)

    first, second = noise_key(2**63 - 1, 131_071)
    tokens = [0, 1, 2, 77, 49_151, 128_255]
    got = gumbel_noise(
        torch.tensor([[first, second]], dtype=torch.int32), torch.tensor(tokens, dtype=torch.int32)
    )
    for index, token in enumerate(tokens):
        spread = mix((token * 0x9E3779B1) & 0xFFFFFFFF)
        bits = mix(spread ^ (first & 0xFFFFFFFF), second) >> 9
        uniform = (bits + 0.5) / 2**23
        assert got[0, index].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-5)


def test_keys_differ_by_seed_and_by_position():
    keys = {noise_key(seed, position) for seed in range(50) for position in range(50)}
    assert len(keys) == 2500
    assert noise_key(3, 4) == noise_key(3, 4)


def test_the_same_seed_in_every_slot_gives_the_same_token():
    logits = logits_for(1).repeat(8, 1)
    params = SamplingParams(temperature=1.0, seed=42)
    assert len(set(draw(logits, [params] * 8))) == 1


def test_another_position_draws_anew():
    logits = torch.zeros(64, VOCAB)
    params = SamplingParams(temperature=1.0, seed=1)
    assert len(set(draw(logits, [params] * 64, list(range(64))))) > 40


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-5])
def test_tiny_temperatures_are_greedy(temperature):
    logits = logits_for(4) * 1e4
    params = SamplingParams(temperature=temperature, top_p=1e-4)
    assert draw(logits, [params] * 4) == logits.argmax(-1).tolist()


def test_a_small_temperature_neither_overflows_nor_yields_nan():
    logits = logits_for(4) * 1e3
    params = SamplingParams(temperature=1e-4)
    assert draw(logits, [params] * 4) == logits.argmax(-1).tolist()


def test_banned_tokens_are_not_chosen_and_greedy_rows_are_not_divided():
    logits = logits_for(3)
    best = logits.argmax(-1).tolist()
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.0),
    ]
    banned = [(best[0],), tuple(range(VOCAB - 1)), ()]
    tokens = draw(logits, params, banned=banned)
    second_best = logits[0].topk(2).indices[1].item()
    assert tokens == [second_best, VOCAB - 1, best[2]]


def test_ties_go_to_the_lowest_id_and_equal_logits_stay_together():
    logits = torch.zeros(1, VOCAB)
    assert draw(logits, [SamplingParams(temperature=0.0)]) == [0]
    seen = {
        draw(logits, [SamplingParams(temperature=1.0, top_k=2, seed=seed)])[0] for seed in range(60)
    }
    assert len(seen) > 30, "top-k of equal logits keeps them all"


def test_unsampled_filters_do_not_touch_greedy_rows():
    logits = logits_for(2)
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.5, seed=9)
    both = draw(logits, [replace(params, temperature=0.0), params])
    assert both[0] == int(logits[0].argmax())
    assert both[1] in kept_by_hand(logits[1], params)


def test_bfloat16_logits_are_sampled_in_float32():
    logits = logits_for(2).bfloat16()
    params = SamplingParams(temperature=0.8, seed=3)
    assert draw(logits, [params] * 2) == draw(logits.float(), [params] * 2)


def packed(tokens, vocab=VOCAB) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(mask_bytes(vocab), "little")


@given(PARAMS, st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=9), st.integers(0, 1000))
def test_a_masked_row_gives_what_it_would_give_if_its_other_logits_were_minus_infinity(
    params, tokens, seed
):
    logits = logits_for(2, seed)
    left_alone = draw(logits[1:], [params])[0]
    masked, other = draw(logits, [params] * 2, allowed=[packed(tokens), None])
    bare = torch.full_like(logits[:1], -torch.inf)
    bare[0, sorted(tokens)] = logits[0, sorted(tokens)]
    assert masked in tokens
    assert masked == draw(bare, [params])[0]
    assert other == left_alone


def test_a_part_of_the_vocabulary_takes_its_own_bits():
    masks = TokenMasks.build([None, packed({1, 40, 74}, vocab=80)])
    assert masks is not None
    part = torch.zeros(2, 35)
    masks.apply(part, first_id=40)
    assert part[1].isfinite().nonzero()[:, 0].tolist() == [0, 34]
    assert part[0].isfinite().all()
    assert TokenMasks.build([None, None]) is None
