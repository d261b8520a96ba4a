"""Parsing: defaults, types, ranges, refusals by name."""

from __future__ import annotations

import pytest

from protocol.errors import BatonError, ErrorCode
from router.request.body import HARMLESS, UNSERVED
from router.request.chat_messages import ChatRole
from tests.support.typed_requests import HI as USER
from tests.support.typed_requests import chat, completion


def refusal(call, **fields: object) -> tuple[ErrorCode, str | None]:
    with pytest.raises(BatonError) as caught:
        call(**fields)
    return caught.value.code, caught.value.param


def test_defaults() -> None:
    request = completion()
    assert (request.temperature, request.top_p, request.top_k, request.min_p) == (None,) * 4
    assert (request.n, request.output_limit, request.min_tokens, request.seed) == (1, None, 0, None)
    assert (request.stops, request.stop_token_ids, request.ignore_eos) == ((), (), False)
    assert (request.stream, request.include_usage, request.model) == (False, False, None)


def test_null_means_unset() -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "seed", "n", "max_tokens", "stop", "stream", "user", "logprobs"]
    )
    assert completion(**nulls) == completion()


def test_zero_is_not_unset() -> None:
    assert completion(temperature=0).temperature == 0.0
    assert completion(seed=0).seed == 0


def test_prompts() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == ([1, 2],)
    assert completion(prompt=[[1, 2], [3]]).prompts == [[1, 2], [3]]
    assert completion(prompt=["a", "b"], n=3).num_sequences == 6


def test_messages() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = chat(
        messages=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": "", "tool_calls": None, "refusal": None},
        ]
    )
    assert [message.role for message in request.messages] == [
        ChatRole.SYSTEM,
        ChatRole.USER,
        ChatRole.ASSISTANT,
    ]
    assert request.messages[1].text == "one\ntwo"
    assert request.messages[1].name == "ann"


def test_stop_is_a_string_or_several() -> None:
    assert completion(stop="x").stops == ("x",)
    assert completion(stop=["x", "yz"]).stops == ("x", "yz")


def test_both_names_of_max_tokens() -> None:
    assert chat(max_completion_tokens=5).output_limit == 5
    assert chat(max_completion_tokens=5).output_limit_param == "max_completion_tokens"
    assert chat(max_tokens=5, max_completion_tokens=5).output_limit == 5
    assert refusal(chat, max_tokens=5, max_completion_tokens=6)[1] == "max_completion_tokens"


def test_top_k_minus_one_is_off() -> None:
    assert completion(top_k=-1).top_k == 0


WRONG = [
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", {}),
    ("top_k", 1.5),
    ("top_k", 2**70),
    ("seed", "7"),
    ("seed", 10**400),
    ("temperature", 10**400),
    ("n", 0),
    ("n", 17),
    ("n", 2.0),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", "many"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 2000),
    ("stop", 7),
    ("stop_token_ids", "1"),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [True]),
    ("ignore_eos", 1),
    ("stream", "yes"),
    ("user", 5),
    ("model", ["m"]),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", "soon"),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {}),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [1, "a"]),
    ("prompt", [1.5]),
    ("prompt", [None]),
    ("prompt", [True]),
    ("prompt", ["a"] * 257),
    ("prompt", "\ud800"),
    ("no_such_field", 1),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_values_are_refused_by_name(field: str, value: object) -> None:
    assert refusal(completion, **{field: value}) == (ErrorCode.INVALID_REQUEST, field)


WRONG_MESSAGES = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    (["hi"], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": 1, "content": "x"}], "messages[0].role"),
    ([{"role": "foo", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": "\udfff"}], "messages[0].content"),
    ([*USER, {"role": "user", "content": ["x"]}], "messages[1].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
]


@pytest.mark.parametrize(("messages", "param"), WRONG_MESSAGES)
def test_wrong_messages_are_refused_by_path(messages: object, param: str) -> None:
    assert refusal(chat, messages=messages) == (ErrorCode.INVALID_REQUEST, param)


UNSUPPORTED_MESSAGES = [
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
]


@pytest.mark.parametrize(("messages", "param"), UNSUPPORTED_MESSAGES)
def test_unserved_messages_are_refused_by_path(messages: object, param: str) -> None:
    assert refusal(chat, messages=messages) == (ErrorCode.UNSUPPORTED, param)


@pytest.mark.parametrize("field", sorted(UNSERVED))
def test_every_unserved_field_is_refused_by_name(field: str) -> None:
    value = {"asks": "for something"}
    assert refusal(chat, **{field: value}) == (ErrorCode.UNSUPPORTED, field)
    assert refusal(completion, **{field: value}) == (ErrorCode.UNSUPPORTED, field)


def test_neutral_values_of_every_unserved_field_pass() -> None:
    neutral = {name: values[0] for name, values in UNSERVED.items() if values}
    assert chat(**neutral) == chat()
    assert chat(**dict.fromkeys(UNSERVED)) == chat()


def test_a_value_that_only_looks_neutral_is_refused() -> None:
    assert refusal(completion, best_of=True) == (ErrorCode.UNSUPPORTED, "best_of")


def test_logprobs() -> None:
    assert (chat().num_logprobs, chat(logprobs=True).num_logprobs) == (None, 0)
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    assert (completion(logprobs=0).num_logprobs, completion(logprobs=5).num_logprobs) == (0, 5)
    assert completion(logprobs=True, top_logprobs=5).num_logprobs == 5
    assert chat(logprobs=False, top_logprobs=0).num_logprobs is None
    for call, wrong in (
        (chat, {"logprobs": 5}),
        (completion, {"logprobs": 21}),
        (completion, {"logprobs": -1}),
        (completion, {"logprobs": "5"}),
        (completion, {"logprobs": 1.5}),
    ):
        assert refusal(call, **wrong) == (ErrorCode.INVALID_REQUEST, "logprobs")
    for wrong in ({"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}):
        assert refusal(chat, **wrong) == (ErrorCode.INVALID_REQUEST, "top_logprobs")
    assert refusal(completion, logprobs=2, top_logprobs=2)[1] == "top_logprobs"


def test_what_workers_tell_of_the_prompt() -> None:
    assert completion(logprobs=3).prompt_scores is None
    assert completion(logprobs=3, echo=True).prompt_scores == 3
    assert completion(logprobs=3, echo=True, prompt_logprobs=7).prompt_scores == 7
    assert completion(echo=True).prompt_scores is None
    assert completion(echo=True, max_tokens=0).prompt_scores == 0
    assert refusal(completion, max_tokens=0)[1] == "max_tokens"


def test_penalties_and_biases() -> None:
    request = chat(
        presence_penalty=1,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "9": 0.5},
    )
    assert (request.presence_penalty, request.frequency_penalty) == (1.0, -0.5)
    assert (request.repetition_penalty, request.biases) == (1.1, ((7, -100.0), (9, 0.5)))
    assert refusal(completion, presence_penalty=False)[1] == "presence_penalty"
    for wrong in ([], "7", {"7": "x"}, {"7": None}, {"": 1}, {"1" * 30: 1}, {"٣": 1}):
        assert refusal(completion, logit_bias=wrong) == (ErrorCode.INVALID_REQUEST, "logit_bias")


def test_best_of_n_of_n_is_all_of_them() -> None:
    assert completion(best_of=3, n=3).n == 3
    assert refusal(completion, best_of=3, n=2)[1] == "best_of"


def test_harmless_fields_pass() -> None:
    assert chat(**{name: {"any": "thing"} for name in HARMLESS}) == chat()


def test_fields_of_the_other_kind_are_unknown() -> None:
    assert refusal(chat, prompt="x")[1] == "prompt"
    assert refusal(completion, messages=USER)[1] == "messages"


def test_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_usage": False}).include_usage
    assert refusal(chat, stream_options={"include_usage": True})[1] == "stream_options"
    wrong = {"include_usage": "yes"}
    assert refusal(chat, stream=True, stream_options=wrong)[1] == "stream_options.include_usage"
    other = {"colour": "red"}
    assert refusal(chat, stream=True, stream_options=other)[1] == "stream_options.colour"
