"""Messages of baton.v1 from deltas."""

from __future__ import annotations

from protocol.states import FinishReason
from protocol.wire import inference_pb2 as pb
from router.dispatch.request_run import Delta
from router.grpc.answers import add_choice
from router.text.tool_parser import CallDelta


def test_a_choice_has_all_that_a_delta_has() -> None:
    delta = Delta(2, "text", [5, 6], FinishReason.TOOL_CALLS, reasoning="thought")
    delta.calls = [CallDelta(1, "{", id="call", name="f"), CallDelta(1, "}")]
    message = pb.GenerateResponse(id="a")
    add_choice(message, Delta(0, "", [], None), token_ids=True)
    added = add_choice(message, delta, token_ids=True)
    expected = pb.Choice(
        index=2,
        text="text",
        reasoning="thought",
        token_ids=[5, 6],
        finish_reason="tool_calls",
        tool_calls=[
            pb.ToolCallDelta(index=1, id="call", name="f", arguments="{"),
            pb.ToolCallDelta(index=1, arguments="}"),
        ],
    )
    assert added == expected
    assert message == pb.GenerateResponse(id="a", choices=[pb.Choice(), expected])
    assert not message.choices[0].HasField("finish_reason")


def test_token_ids_are_left_out_on_request() -> None:
    message = pb.GenerateResponse()
    add_choice(message, Delta(0, "text", [5], None), token_ids=False)
    assert message == pb.GenerateResponse(choices=[pb.Choice(text="text")])
