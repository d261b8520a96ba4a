"""Lengths and seeds of the sequences that workers run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.errors import ContextTooLong, InvalidRequest
from protocol.sampling import MAX_SEED, usable_defaults
from router.dispatch.sequence_jobs import TokenLimits, base_sampling, check_ids, make_jobs
from router.dispatch.sequence_run import SequenceJob
from router.request.generate_request import GenerateRequest, make_request_id
from tests.support.typed_requests import chat, completion

WIDE = TokenLimits(vocab_size=100, context=64, capacity=1000)
NARROW = TokenLimits(vocab_size=100, context=64, capacity=32)
ID = make_request_id(None)


def jobs(
    limits: TokenLimits, length: int, kind: str = "completion", **fields: object
) -> list[SequenceJob]:
    request = chat(**fields) if kind == "chat" else completion(**fields)
    sampling = base_sampling(request, limits, eos_ids=[2], seed=77)
    ids = tuple(range(1, length + 1))
    return make_jobs(request, [ids], sampling, limits, request_id=ID, deadline=9.0)


def max_tokens(limits: TokenLimits, length: int, kind: str = "completion", **fields: object) -> int:
    return jobs(limits, length, kind, **fields)[0].sampling.max_tokens


def test_defaults_of_max_tokens() -> None:
    assert max_tokens(WIDE, 10) == 16
    assert max_tokens(WIDE, 10, "chat") == 54
    assert max_tokens(WIDE, 60) == 4  # what is left
    assert max_tokens(NARROW, 10, "chat") == 22  # the pool is smaller than the context
    assert max_tokens(WIDE, 10, min_tokens=20) == 20


def test_an_explicit_max_tokens_must_fit() -> None:
    assert max_tokens(WIDE, 10, max_tokens=54) == 54
    with pytest.raises(ContextTooLong, match="context is 64") as caught:
        jobs(WIDE, 10, max_tokens=55)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextTooLong) as caught:
        jobs(WIDE, 10, "chat", max_completion_tokens=1000)
    assert caught.value.param == "max_completion_tokens"
    with pytest.raises(ContextTooLong, match="KV pool") as caught:
        jobs(NARROW, 10, max_tokens=23)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(("limits", "longest"), [(WIDE, 63), (NARROW, 31)])
def test_the_prompt_must_leave_room_for_one_token(limits: TokenLimits, longest: int) -> None:
    assert max_tokens(limits, longest) == 1
    for length in (longest + 1, longest + 2):
        with pytest.raises(ContextTooLong) as caught:
            jobs(limits, length)
        assert caught.value.param == "prompt"
    with pytest.raises(ContextTooLong) as caught:
        jobs(limits, longest + 1, "chat")
    assert caught.value.param == "messages"


def test_min_tokens_over_what_fits_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        jobs(WIDE, 60, min_tokens=5)
    assert caught.value.param == "min_tokens"


def test_each_choice_has_its_place_and_its_seed() -> None:
    request = completion(prompt=["a", "b"], n=3, seed=MAX_SEED)
    sampling = base_sampling(request, WIDE, eos_ids=[], seed=0)
    made = make_jobs(request, [(5,), (6,)], sampling, WIDE, request_id=ID, deadline=1.0)
    assert [job.index for job in made] == list(range(6))
    assert [job.prompt_ids for job in made] == [(5,)] * 3 + [(6,)] * 3
    assert [job.sampling.seed for job in made] == [MAX_SEED, 0, 1] * 2
    assert len({job.request_id for job in made}) == 6


def test_a_missing_seed_is_filled_in() -> None:
    assert jobs(WIDE, 3)[0].sampling.seed == 77
    assert jobs(WIDE, 3, seed=0)[0].sampling.seed == 0


def test_a_seed_below_zero_is_one_like_any_other() -> None:
    """As OpenAI documents it; workers know none below zero."""
    assert [job.sampling.seed for job in jobs(WIDE, 3, seed=-1, n=2)] == [MAX_SEED, 0]
    assert jobs(WIDE, 3, seed=-(2**63) + 1)[0].sampling.seed == 1


@pytest.mark.parametrize("ids", [[], [-1], [100], [5, 4294967295]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_ids(ids, WIDE, param="prompt")
    assert caught.value.param == "prompt"


OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", 1e9),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("min_tokens", -1),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [100]),
    ("stop_token_ids", list(range(65))),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_sampling_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        jobs(WIDE, 3, **{field: value})
    assert caught.value.param == field


OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}


@pytest.mark.parametrize("kind", [chat, completion])
def test_the_models_defaults_are_for_what_a_request_leaves_out(
    kind: Callable[..., GenerateRequest],
) -> None:
    def chosen(**fields: object) -> dict[str, object]:
        sampling = base_sampling(kind(**fields), WIDE, eos_ids=[2], seed=1, defaults=OWN)
        return {name: getattr(sampling, name) for name in OWN}

    assert chosen() == OWN
    assert chosen(temperature=None, top_p=None) == OWN
    neutral = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert chosen(**neutral) == neutral
    assert chosen(temperature=0, top_k=-1) == OWN | {"temperature": 0, "top_k": 0}


@pytest.mark.parametrize(
    ("config", "usable"),
    [
        (OWN | {"do_sample": False, "max_new_tokens": 9, "eos_token_id": [1]}, OWN),
        ({"temperature": None, "top_k": 50}, {"top_k": 50}),
        ({"temperature": -1, "top_p": 0, "top_k": "many", "min_p": 2}, {}),
        ({"temperature": 1, "top_k": 2}, {"temperature": 1.0, "top_k": 2}),
    ],
)
def test_values_out_of_range_are_no_defaults(
    config: dict[str, object], usable: dict[str, object]
) -> None:
    assert usable_defaults(config) == usable
