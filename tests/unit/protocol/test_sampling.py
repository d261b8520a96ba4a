import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.errors import InvalidRequest
from protocol.sampling import MAX_SEED, SamplingParams

VOCAB = 1000
GOOD = SamplingParams()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"top_k": 0},
        {"top_k": 2**31 - 1},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"max_tokens": 1},
        {"max_tokens": 10**9},
        {"min_tokens": 16, "max_tokens": 16},
        {"stop_token_ids": tuple(range(64))},
        {"stop_token_ids": (0, VOCAB - 1)},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"logit_bias": ((0, -100.0), (VOCAB - 1, 100.0))},
        {"logit_bias": tuple((i, 1.0) for i in range(VOCAB))},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"prompt_logprobs": 0, "max_tokens": 0},
    ],
    ids=str,
)
def test_the_edges_of_every_range_are_good(changes):
    replace(GOOD, **changes).validate(VOCAB)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": 100.5}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": math.inf}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.0001}),
        ("top_p", {"top_p": math.nan}),
        ("min_p", {"min_p": -1e-9}),
        ("min_p", {"min_p": 1.5}),
        ("min_p", {"min_p": math.nan}),
        ("top_k", {"top_k": -1}),
        ("top_k", {"top_k": 2**31}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": MAX_SEED + 1}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -5}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 17, "max_tokens": 16}),
        ("stop_token_ids", {"stop_token_ids": tuple(range(65))}),
        ("stop_token_ids", {"stop_token_ids": (3, VOCAB)}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
        ("presence_penalty", {"presence_penalty": 2.01}),
        ("frequency_penalty", {"frequency_penalty": math.nan}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": math.inf}),
        ("logit_bias", {"logit_bias": ((VOCAB, 1.0),)}),
        ("logit_bias", {"logit_bias": ((1, 1.0), (1, 2.0))}),
        ("logit_bias", {"logit_bias": ((1, -100.1),)}),
        ("logit_bias", {"logit_bias": tuple((i, 1.0) for i in range(1025))}),
        ("logprobs", {"logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
    ],
    ids=str,
)
def test_out_of_range_names_the_field(field, changes):
    with pytest.raises(InvalidRequest) as caught:
        replace(GOOD, **changes).validate(VOCAB)
    assert caught.value.param == field
    assert field in caught.value.message


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(),
        top_k=st.integers(-5, 5),
        top_p=st.floats(),
        min_p=st.floats(),
        seed=st.integers(),
        max_tokens=st.integers(-5, 5),
        min_tokens=st.integers(-5, 5),
    )
)
def test_what_passes_is_safe_to_sample_with(params):
    try:
        params.validate(VOCAB)
    except InvalidRequest:
        return
    assert 0.0 <= params.temperature <= 100.0
    assert 0.0 < params.top_p <= 1.0
    assert 0.0 <= params.min_p <= 1.0
    assert 0 <= params.min_tokens <= params.max_tokens
    assert params.seed.bit_length() <= 63


@pytest.mark.parametrize(
    ("changes", "greedy"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 9e-5}, True),
        ({"temperature": 1e-4}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 1.0, "top_k": 2}, False),
    ],
    ids=str,
)
def test_greedy(changes, greedy):
    assert replace(GOOD, **changes).greedy is greedy


class TestEnds:
    params = SamplingParams(stop_token_ids=(7,), eos_token_ids=(2,), min_tokens=3, max_tokens=9)

    def test_before_and_at_min_tokens_nothing_ends(self):
        for count in (1, 2, 3):
            assert not self.params.ends_with(7, count)
            assert not self.params.ends_with(2, count)

    def test_after_min_tokens_both_kinds_end(self):
        assert self.params.ends_with(7, 4)
        assert self.params.ends_with(2, 4)
        assert not self.params.ends_with(5, 4)

    def test_ignore_eos_spares_stop_tokens(self):
        params = replace(self.params, ignore_eos=True)
        assert not params.ends_with(2, 4)
        assert params.ends_with(7, 4)

    def test_with_no_minimum_the_first_token_may_end(self):
        assert replace(self.params, min_tokens=0).ends_with(2, 1)
