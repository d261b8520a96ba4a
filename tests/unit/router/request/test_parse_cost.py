"""Bodies of many items are parsed on the event loop: no Python code runs for each of them."""

from __future__ import annotations

import sys

import msgspec
import pytest

from protocol.errors import InvalidRequest
from router.request import parse
from router.request.endpoints import CompletionRequest

IDS = ",".join(["1"] * 40_000)


def num_calls(body: str) -> int:
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    parse.parse_json(body.encode(), CompletionRequest)  # fills the caches
    sys.setprofile(count)
    try:
        parse.parse_json(body.encode(), CompletionRequest)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "other",
    ['"n":null', '"metadata":{}', '"best_of":1', '"n":null,"cache_salt":"\\ud83d\\ude00"'],
)
def test_token_ids_beside_fields_that_ask_for_nothing(other: str) -> None:
    assert num_calls(f'{{"prompt":[{IDS}],{other}}}') < 2000


def test_too_many_prompts_are_refused_before_they_are_converted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def convert(*_: object) -> None:
        raise AssertionError("converted")

    monkeypatch.setattr(msgspec, "convert", convert)
    prompts = ",".join(["[1]"] * 30_000)
    with pytest.raises(InvalidRequest, match="prompt: at most 256, got 30000"):
        parse.parse_json(f'{{"prompt":[{prompts}],"n":null}}'.encode(), CompletionRequest)
