"""What one worker can hold."""

from __future__ import annotations

import dataclasses
import math

import pytest
from msgspec.structs import replace

from protocol.errors import ContextTooLong, InvalidRequest
from protocol.ids import Role
from protocol.messages import Submit
from tests.support.submits import LIMITS, make_submit


@pytest.mark.parametrize(
    ("submit", "param", "kind"),
    [
        (make_submit(()), "prompt", InvalidRequest),
        (make_submit((-1,)), "prompt", InvalidRequest),
        (make_submit((100,)), "prompt", InvalidRequest),
        (make_submit((99, 2**40)), "prompt", InvalidRequest),
        (make_submit(output=(4, 100)), "output_ids", InvalidRequest),
        (make_submit(output=(-1, 4)), "output_ids", InvalidRequest),
        (make_submit(temperature=-1.0), "temperature", InvalidRequest),
        (make_submit(stop_token_ids=(100,)), "stop_token_ids", InvalidRequest),
        (make_submit(output=(1,) * 5), "max_tokens", InvalidRequest),
        (replace(make_submit(), time_left_s=math.nan), "time_left_s", InvalidRequest),
        (make_submit((1,) * 46), "max_tokens", ContextTooLong),
        (make_submit((1,) * 36), "prompt", ContextTooLong),
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_the_field(
    submit: Submit, param: str, kind: type[InvalidRequest]
) -> None:
    with pytest.raises(kind) as caught:
        LIMITS.check(submit, Role.DECODE)
    assert caught.value.param == param
    assert type(caught.value) is kind


def test_exact_fit_passes() -> None:
    LIMITS.check(make_submit((1,) * 35), Role.DECODE)
    LIMITS.check(make_submit((99, 0)), Role.DECODE)


def test_prefill_needs_room_for_one_token_only() -> None:
    LIMITS.check(make_submit((1,) * 39, max_tokens=11), Role.PREFILL)
    with pytest.raises(ContextTooLong):
        LIMITS.check(make_submit((1,) * 40, max_tokens=10), Role.PREFILL)


@pytest.mark.parametrize(("context", "expected"), [(50, 39), (20, 19)])
def test_longest_prompt(context: int, expected: int) -> None:
    limits = dataclasses.replace(LIMITS, max_model_len=context)
    assert limits.max_prompt_tokens(Role.DECODE) == expected
