"""`baton bench` against a stub server."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics

import pytest

from benchmarks import serve
from cluster.bench.output import public, publish
from cluster.bench.runs import RateSearch, measure, measure_now, open_loop
from cluster.bench.workload import (
    Ask,
    at_rate,
    cut_window,
    drawn_arrivals,
    mean_rate,
    scale_lengths,
)
from cluster.cli.arguments import make_parser
from protocol.errors import InvalidRequest, Unavailable
from tests.support.sources import ROOT
from tests.unit.cluster.bench.stub_server import Stub, running


def test_keys_are_not_written_down():
    for arguments in (["--api-key", "s3cret", "--url", "x"], ["--api-key=s3cret", "--url", "x"]):
        shown = public(arguments)
        assert "s3cret" not in shown
        assert shown.endswith("--url x")


async def test_the_whole_command_against_a_stub(capsys):
    options = serve.parser().parse_args(
        ["--concurrency", "1,2", "--requests", "4", "--repeats", "2", "--output-tokens", "3"]
    )
    stub = Stub(gap=0.001)
    async with running(stub) as url:
        options.url = url
        runs = [one.run for one in await measure(options)]
    assert [run.label for run in runs] == ["1 client", "2 clients"]
    assert all(len(run.repeats) == 2 for run in runs)
    assert all(s.output_tokens == 12 and not s.failures for run in runs for s in run.repeats)
    assert len(stub.bodies) == 2 + 8 + 4 + 8
    assert stub.bodies[0]["model"] == "stub-model"
    prompts = [tuple(body["prompt"]) for body in stub.bodies]
    assert len(set(prompts)) == len(prompts)
    assert "2 clients:" in capsys.readouterr().out


async def test_a_second_run_meets_no_prompt_of_the_first_in_a_cache():
    stub = Stub()
    arguments = ["--concurrency", "1", "--requests", "2", "--repeats", "1", "--warmup", "0"]
    async with running(stub) as url:
        for more in ([], ["--prompt-tokens", "256"], ["--seed", "3"], ["--seed", "3"]):
            await measure(serve.parser().parse_args([*arguments, *more, "--url", url]))
    prompts = [tuple(body["prompt"][:16]) for body in stub.bodies]
    assert len(set(prompts[:6])) == 6
    assert prompts[4:6] == prompts[6:]  # what was drawn can be asked for again


async def test_a_trace_against_a_stub(tmp_path):
    path = tmp_path / "t.csv"
    rows = "".join(f"{n / 100},0,{n + 1},2\n" for n in range(6))
    path.write_text("t_s,client,input_tokens,output_tokens\n" + rows)
    options = serve.parser().parse_args(
        ["--trace", str(path), "--limit", "5", "--slo-ttft", "5", "--slo-tpot", "5"]
    )
    async with running(Stub()) as url:
        options.url = url
        (one,) = await measure(options)
    run = one.run
    (only,) = run.repeats
    assert (only.requests, only.failures, only.prompt_tokens) == (5, 0, 15)
    assert only.goodput_per_s > 0


def bench(*arguments, url):
    options = make_parser().parse_args(["bench", *arguments, "--seed", "7"])
    options.url = url
    return options


async def test_an_open_loop_with_every_output(tmp_path, capsys):
    output = tmp_path / "deep" / "report"
    arguments = ["--rate", "200", "--cv", "2", "--requests", "30", "--output-tokens", "5"]
    arguments += ["--slo-ttft", "1", "--slo-gap", "0.5", "--slo-e2e", "0.000001", "--gpus", "2"]
    async with running(Stub(delay=0.002, gap=0.002)) as url:
        options = bench(*arguments, "--output", str(output), url=url)
        measured = await measure(options)
    publish(options, measured, command="baton bench")
    data = json.loads(output.with_suffix(".json").read_text())
    (only,) = data["runs"]
    (summary,) = only["repeats"]
    assert summary["kept"] == {"ttft": 1.0, "gap": 1.0, "e2e": 0.0, "all": 0.0}
    assert (summary["requests"], summary["output_tokens"]) == (30, 150)
    assert only["goodput_per_s_per_gpu"] == summary["goodput_per_s"] == 0.0
    assert len(only["requests"]) == 30
    assert all(0.002 <= r["ttft"] <= r["e2e"] and r["gap"] > 0 for r in only["requests"])
    assert only["generator_lag_ms"]["p99"] >= 0
    assert data["machine"]
    assert data["commit"]
    assert data["workload"]["cv"] == 2.0
    page = output.with_suffix(".html").read_text()
    assert page.count("<svg") >= 5
    assert "http" not in page.replace(url, "")  # nothing is fetched
    shown = capsys.readouterr().out
    assert "goodput/s/GPU" in shown
    assert "100.0%" in shown


async def test_failures_are_part_of_every_output(tmp_path):
    async with running(Stub(fail="status")) as url:
        options = bench(
            *("--rate", "500", "--requests", "4", "--warmup", "0", "--model", "m"),
            *("--slo-ttft", "1", "--output", str(tmp_path / "r")),
            url=url,
        )
        measured = await measure(options)
    publish(options, measured, command="baton bench")
    (only,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert all("429" in request["error"] for request in only["requests"])
    assert only["repeats"][0]["kept"] == {"ttft": 0.0, "all": 0.0}


async def test_the_search_finds_where_a_server_stops_keeping_up(capsys):
    """A stub that answers within the promise up to a number of running requests."""

    class Limited(Stub):
        async def stream(self, writer, path, body):
            self.delay = 0.001 if self.running <= 4 else 0.8
            await super().stream(writer, path, body)

    async with running(Limited(gap=0.002)) as url:
        options = bench(
            *("--find-rate", "0.9", "--rate", "20", "--requests", "40", "--output-tokens", "8"),
            *("--slo-ttft", "0.2", "--min-seconds", "0.05"),
            url=url,
        )
        measured = await measure(options)
    rates = [one.rate for one in measured]
    assert len(measured) >= 3
    assert rates == sorted(rates)
    assert measured[0].run.repeats[0].kept["all"] >= 0.9 > measured[-1].run.repeats[0].kept["all"]
    assert "highest rate with 90% of the requests good" in capsys.readouterr().out


async def test_a_search_ends_where_its_requests_would_be_one_burst(capsys):
    async with running(Stub()) as url:
        options = bench(
            *("--find-rate", "--rate", "100", "--requests", "40", "--slo-ttft", "5"),
            *("--min-seconds", "0.3"),
            url=url,
        )
        measured = await measure(options)
        assert len(measured) == 1
        assert "the search needs more" in capsys.readouterr().out
        options.requests = 0
        assert len(open_loop(options, 5000.0)) == 1500


async def test_clients_are_no_part_of_an_open_loop():
    arguments = ["--url", "http://h:1", "--concurrency", "2", "--rate", "3"]
    with pytest.raises(InvalidRequest, match="--concurrency is of closed loops"):
        await measure(serve.parser().parse_args(arguments))


async def test_a_server_that_wants_a_key_says_so():
    async with running(Stub(fail="key")) as url:
        options = serve.parser().parse_args(["--url", url])
        with pytest.raises(Unavailable, match="HTTP 401") as caught:
            await asyncio.to_thread(measure_now, options)
    assert "--tls" not in caught.value.message


@pytest.mark.parametrize("more", [["--concurrency", "2"], ["--rate", "9", "--cv", "1"]])
async def test_a_run_ends_where_every_request_of_the_warm_up_fails(more):
    stub = Stub(fail="status")
    async with running(stub) as url:
        options = serve.parser().parse_args(["--warmup", "2", *more, "--url", url])
        with pytest.raises(Unavailable, match="every request of the warm-up failed: HTTP 429"):
            await measure(options)
    assert len(stub.bodies) in (2, 4)


async def test_a_search_needs_a_promise():
    with pytest.raises(InvalidRequest, match="needs a promise"):
        await measure(bench("--find-rate", url="http://h:1"))


@pytest.mark.parametrize("url", ["http://h:99999", "ftp://h:1", "http://", "grpc://:1", "h:1"])
def test_what_is_no_server_is_refused(url):
    with pytest.raises(InvalidRequest, match="expected http"):
        measure_now(bench("--model", "m", url=url))


@pytest.mark.parametrize("text", [None, "", "x,y\n1,2\n", "ContextTokens\n1\n", "[1]", "\ud800"])
def test_a_trace_that_cannot_be_read_is_named(tmp_path, text):
    path = tmp_path / "trace.jsonl" if text == "[1]" else tmp_path / "trace.csv"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidRequest, match=r"/trace\.(csv|jsonl): "):
        open_loop(bench("--trace", str(path), url="http://h:1"), None)


def test_an_absent_server_is_an_error():
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        measure_now(bench(url="http://127.0.0.1:1"))
    assert serve.main(["--url", "http://127.0.0.1:1"]) == 2


@pytest.mark.parametrize(("limit", "start"), [(37.0, 1.0), (0.3, 8.0), (8.0, 8.0)])
def test_the_search_narrows_down(limit, start):
    search, rates = RateSearch(start), []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.add(rate, 1.0 if rate <= limit else 0.5)
    assert limit / 1.1 <= search.best <= limit
    assert len(rates) <= 16


def test_a_server_that_keeps_nothing_has_no_rate():
    search = RateSearch(1.0)
    while (rate := search.next_rate()) is not None:
        search.add(rate, 0.0)
    assert search.best == 0.0


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_drawn_arrivals_have_the_rate_and_the_variation(cv):
    asks = [Ask(prompt_tokens=1, output_tokens=1)] * 20_000
    drawn = drawn_arrivals(asks, 50.0, cv=cv, seed=1)
    gaps = [b.at - a.at for a, b in itertools.pairwise(drawn)]
    assert mean_rate(drawn) == pytest.approx(50.0, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)
    assert drawn_arrivals(asks, 50.0, cv=cv, seed=1) == drawn


def test_traces_are_cut_scaled_and_stretched():
    source = random.Random(2)
    asks = [
        Ask(at=float(n), prompt_tokens=source.randint(1, 9), output_tokens=3) for n in range(20)
    ]
    window = cut_window(asks, 5.0, 10.0)
    assert [ask.at for ask in window] == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="no request arrives"):
        cut_window(asks, 50.0, math.inf)
    longer = scale_lengths(window, 2.0, 0.1)
    assert [ask.prompt_tokens for ask in longer] == [2 * ask.prompt_tokens for ask in window]
    assert {ask.output_tokens for ask in longer} == {1}
    assert mean_rate(at_rate(window, 8.0)) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("azure2023_conv.csv", (374, 44)),
        ("servegen_r1_sampled.csv", None),
        ("mooncake_conversation.jsonl", None),
    ],
)
def test_the_traces_of_the_formats(name, first):
    path = ROOT.parent / "shared" / "traces" / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    arguments = ["--trace", str(path), "--window", "60:120", "--limit", "50", "--speed", "2"]
    clip = ["--prompt-tokens", "100000", "--output-tokens", "5000"]
    asks = open_loop(bench(*arguments, *clip, url=""), None)
    assert 0 < len(asks) <= 50
    assert all(0 <= ask.at <= 30 for ask in asks)
    assert mean_rate(open_loop(bench(*arguments, url=""), 4.0)) == pytest.approx(4.0)
    assert first is None or len(asks) == 50
