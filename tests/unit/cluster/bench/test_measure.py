import json

import pytest

from cluster.bench.http_stream import Answer
from cluster.bench.measure import Result, Slo, percentile, read_answer, summarise


def result(sent=0.0, times=(1.0, 2.0, 4.0), **changes):
    values = {"sent": sent, "ended": times[-1] + 0.5, "chunk_times": times}
    return Result(**{**values, "output_tokens": len(times), "prompt_tokens": 10, **changes})


def test_definitions_of_one_request():
    one = result(sent=0.5)
    assert one.ttft == 0.5
    assert one.e2e == 3.5
    assert one.gaps == [1.0, 2.0]
    assert one.tpot == 1.5
    assert result(times=(1.0,)).tpot is None


def test_the_first_token_of_a_thought_is_the_first_token():
    deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "x"}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    pieces = tuple((float(i), line) for i, line in enumerate([*lines, b"data: [DONE]\n\n"]))
    answer = Answer(status=200, sent=0.0, ended=4.0, pieces=pieces)
    assert read_answer(answer, expected_tokens=2).chunk_times == (1.0, 2.0)


@pytest.mark.parametrize(
    "choices",
    [
        [{"text": "x"}, {"text": ""}, {"text": "y"}, {"text": "", "finish_reason": "stop"}],
        [
            {"delta": {"role": "assistant", "content": ""}},
            *({"delta": {"content": text}} for text in ("x", "", "y")),
            {"delta": {}, "finish_reason": "stop"},
        ],
    ],
)
def test_a_token_without_text_is_one(choices):
    """The second byte of a character, say; the opening of a chat and the end alone are none."""
    events = [{"choices": [choice]} for choice in choices]
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    pieces = tuple((float(i), line) for i, line in enumerate([*lines, b"data: [DONE]\n\n"]))
    answer = Answer(status=200, sent=0.0, ended=9.0, pieces=pieces)
    result = read_answer(answer, expected_tokens=3)
    assert (len(result.chunk_times), result.output_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, 0.0),
        ([3.0], 99, 3.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6),
        (list(map(float, range(101))), 99, 99.0),
    ],
)
def test_percentiles_interpolate(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


def test_a_summary_counts_wall_time_from_first_send_to_last_end():
    summary = summarise([result(), result(sent=1.0, times=(2.0, 9.5))])
    assert summary.wall_s == 10.0
    assert summary.output_tokens == 5
    assert summary.output_tokens_per_s == 0.5
    assert summary.requests_per_s == 0.2
    assert summary.prompt_tokens == 20
    assert summary.ttft_ms["p50"] == 1000.0
    assert summary.max_gap_ms == 7500.0


def test_failures_are_left_out_of_latencies_but_not_of_counts():
    failed = Result(sent=0.0, ended=20.0, error="HTTP 503")
    summary = summarise([result(), failed])
    assert (summary.requests, summary.failures) == (2, 1)
    assert summary.errors == {"HTTP 503": 1}
    assert summary.wall_s == 20.0
    assert summary.e2e_ms["p99"] == 4000.0


def test_goodput_wants_every_slo_met():
    slo = Slo(ttft=1.0, tpot=1.5)
    late = result(times=(1.1, 1.2))
    slow = result(times=(1.0, 3.0))
    failed = Result(sent=0.0, ended=4.5, error="x")
    assert [slo.met_by(r) for r in (result(), late, slow, failed)] == [True, False, False, False]
    assert summarise([result(), late, slow, failed], slo).goodput_per_s == pytest.approx(1 / 4.5)
    assert summarise([result()]).goodput_per_s is None


def test_a_slo_may_bound_every_gap():
    one_stall = result(times=(1.0, 1.5, 3.5))
    assert Slo(ttft=1.0, tpot=1.5).met_by(one_stall)
    assert Slo(ttft=1.0, tpot=1.5, gap=2.0).met_by(one_stall)
    assert not Slo(ttft=1.0, tpot=1.5, gap=1.9).met_by(one_stall)


def test_no_results_is_an_error():
    with pytest.raises(ValueError, match="no request"):
        summarise([])
