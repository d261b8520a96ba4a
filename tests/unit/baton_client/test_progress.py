"""When calls are tried again, and which request goes on."""

from __future__ import annotations

import grpc
import pytest

from baton_client.errors import CallError
from baton_client.progress import OutputPart, Progress, Retry, WholeOutput, is_resumable
from baton_client.requests import Options, generate_request
from protocol.wire import inference_pb2 as wire

LOST = CallError("lost", status=grpc.StatusCode.UNAVAILABLE)
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
BUSY = CallError("busy", status=FULL, code="overloaded", retry_after_s=3.0)
LARGE = CallError("larger than 8 MiB", status=FULL)
WRONG = CallError("wrong", status=grpc.StatusCode.INVALID_ARGUMENT)
STEADY = Retry(attempts=3, first_s=1.0, max_s=4.0, draw=lambda: 1.0)


def message(*ids: int, prompt: tuple[int, ...] = (), text: str = "x") -> wire.GenerateResponse:
    choice = wire.Choice(index=0, text=text, token_ids=ids, prompt_token_ids=prompt)
    return wire.GenerateResponse(id="r", choices=[choice])


def test_delays_double_up_to_a_bound_and_wait_as_told() -> None:
    patient = Retry(attempts=9, first_s=1.0, max_s=5.0, draw=lambda: 1.0)
    assert [patient.delay_s(n, LOST) for n in (1, 2, 3, 4, 5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert Retry(first_s=1.0, draw=lambda: 0.0).delay_s(1, LOST) == 0.5
    assert patient.delay_s(1, BUSY) == 3.0
    assert STEADY.delay_s(3, LOST) is None
    assert STEADY.delay_s(1, WRONG) is None
    assert STEADY.delay_s(1, LARGE) is None


def test_before_the_first_token_the_same_request_is_sent() -> None:
    progress = Progress(generate_request("hi", None, {"n": 2}), retry=STEADY, resume=True)
    assert progress.next_request().prompt == "hi"
    assert progress.retry_after_s(BUSY) == 3.0
    assert progress.retry_after_s(LOST) == 2.0
    assert progress.next_request().n == 2
    assert progress.retry_after_s(LOST) is None  # the third failure


def test_after_tokens_a_request_goes_on_behind_them() -> None:
    request = generate_request("hi", None, {"max_tokens": 10, "min_tokens": 4, "top_k": 5})
    progress = Progress(request, retry=STEADY, resume=True)
    first = progress.next_request()
    assert first.return_token_ids
    assert first.HasField("seed")
    progress.take(message(7, 8, prompt=(1, 2)))
    assert progress.retry_after_s(LOST) == 1.0
    rest = progress.next_request()
    assert list(rest.prompt_token_ids.ids) == [1, 2, 7, 8]
    assert (rest.max_tokens, rest.min_tokens, rest.top_k, rest.seed) == (8, 2, 5, first.seed)
    progress.take(message(9, 10, 11, prompt=(1, 2, 7, 8)))
    assert progress.retry_after_s(LOST) == 1.0  # there was progress
    rest = progress.next_request()
    assert list(rest.prompt_token_ids.ids) == [1, 2, 7, 8, 9, 10, 11]
    assert (rest.max_tokens, rest.min_tokens) == (5, 0)
    usage = wire.Usage(prompt_tokens=7, completion_tokens=1, total_tokens=8)
    end = wire.Choice(index=0, finish_reason="stop")
    progress.take(wire.GenerateResponse(choices=[end], usage=usage))
    assert progress.ended()
    assert progress.answer.usage is not None
    assert progress.answer.usage.prompt_tokens == 2
    assert progress.answer.usage.completion_tokens == 5


def test_a_chat_goes_on_as_a_completion_to_the_end_of_the_context() -> None:
    chat = generate_request(None, [{"role": "user", "content": "hi"}], {"reasoning_effort": "low"})
    progress = Progress(chat, retry=STEADY, resume=True)
    assert not progress.needs_context
    progress.take(message(7, prompt=(1, 2, 3)))
    assert progress.needs_context
    rest = progress.next_request(100)
    assert rest.WhichOneof("input") == "prompt_token_ids"
    assert rest.max_tokens == 96
    assert not rest.HasField("reasoning_effort")


def test_a_completion_without_a_limit_goes_on_to_the_end_of_the_context() -> None:
    progress = Progress(generate_request("hi", None, {}), retry=STEADY, resume=True)
    progress.take(message(7, prompt=(1, 2, 3)))
    assert progress.needs_context
    assert progress.next_request(100).max_tokens == 15
    assert progress.next_request(10).max_tokens == 6


def test_only_lost_connections_go_on_and_errors_carry_what_was_had() -> None:
    progress = Progress(generate_request("hi", None, {}), retry=STEADY, resume=True)
    progress.take(message(7, prompt=(1,), text="seven"))
    for error in (BUSY, WRONG):
        assert progress.retry_after_s(error) is None
        assert (error.text, error.token_ids) == ("seven", (7,))


def test_a_thought_does_not_go_on_and_the_answer_behind_it_does() -> None:
    chat = generate_request(None, [{"role": "user", "content": "hi"}], {"max_tokens": 9})
    progress = Progress(chat, retry=STEADY, resume=True)
    thought = wire.Choice(index=0, reasoning="hm", token_ids=[7], prompt_token_ids=[1])
    (part,) = progress.take(wire.GenerateResponse(choices=[thought]))
    assert part.reasoning == "hm"
    assert progress.retry_after_s(LOST) is None
    progress.take(message(8))
    assert progress.retry_after_s(LOST) is not None
    assert list(progress.next_request().prompt_token_ids.ids) == [1, 7, 8]
    assert (progress.answer.reasonings, progress.answer.texts) == (["hm"], ["x"])


def test_options_are_fields_of_the_request() -> None:
    """Every field but those that the client sets itself, and those that are not served."""
    known = set(wire.GenerateRequest.DESCRIPTOR.fields_by_name)
    own = {"prompt", "prompt_token_ids", "prompts", "chat", "stream", "stream_options", "timeout"}
    assert known - set(Options.__annotations__) == own | {
        *("max_completion_tokens", "suffix", "best_of")
    }
    assert set(Options.__annotations__) <= known


@pytest.mark.parametrize(
    ("options", "resumable"),
    [
        ({"temperature": 0.5, "stop": ["a"], "repetition_penalty": 1.2, "n": 1}, True),
        ({"n": 2}, False),
        ({"logprobs": True}, False),
        ({"presence_penalty": 0.1}, False),
        ({"guided_choice": ["a"]}, False),
        ({"tools": [{"name": "f"}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
def test_what_can_go_on(options: dict, resumable: bool) -> None:
    assert is_resumable(generate_request("hi", None, options)) is resumable


def test_requests_take_openais_nesting_and_schemas_as_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = generate_request(
        None,
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "logit_bias": {"5": 1.0},
            "structured_outputs": {"choice": ["x", "y"]},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    assert request.chat.messages[0].parts[0].text == "a"
    assert request.chat.messages[1].tool_calls[0].name == "f"
    assert request.tools[0].parameters == '{"a": 1}'
    assert request.tool_choice.function == "f"
    assert request.logit_bias["5"] == 1.0
    assert list(request.structured_outputs.choice) == ["x", "y"]
    assert request.chat_template_kwargs == '{"enable_thinking": false}'


def test_an_answer_joins_the_parts_of_calls() -> None:
    answer = WholeOutput()
    for index, arguments in ((0, "{"), (0, "}"), (1, "{}")):
        delta = wire.ToolCallDelta(index=index, name="f", arguments=arguments)
        answer.add(OutputPart(index=0, text="", tool_calls=[delta]))
    assert [call.arguments for call in answer.tool_calls[0]] == ["{}", "{}"]
