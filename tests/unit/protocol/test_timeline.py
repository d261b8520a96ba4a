"""W3C Trace Context."""

import pytest

from protocol.timeline import TraceContext, parse_trace

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_parent_is_read_and_written() -> None:
    context = parse_trace(f"00-{TRACE}-{SPAN}-01", "vendor=1,other=2")
    assert context == TraceContext(
        trace_id=TRACE, span_id=SPAN, sampled=True, state="vendor=1,other=2"
    )
    assert context.parent == f"00-{TRACE}-{SPAN}-01"
    assert parse_trace(f"00-{TRACE}-{SPAN}-00", None).sampled is False


def test_a_later_version_may_say_more() -> None:
    assert parse_trace(f"01-{TRACE}-{SPAN}-03-more", None).parent == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "parent",
    [
        *(None, "", "nonsense", f"00-{TRACE}-{SPAN}", f"ff-{TRACE}-{SPAN}-01"),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-01-x"),
        *(f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE[1:]}-{SPAN}-01"),
    ],
)
def test_what_is_not_valid_is_no_parent(parent: str | None) -> None:
    assert parse_trace(parent, "vendor=1") is None


@pytest.mark.parametrize("state", ["x" * 513, "é=1", "a=1\n"])
def test_a_state_that_cannot_be_passed_on_is_dropped(state: str) -> None:
    assert parse_trace(f"00-{TRACE}-{SPAN}-01", state).state == ""
