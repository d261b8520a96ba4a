"""The runs that the options ask for: closed loops, arrivals at given times, a search for a rate."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvloop
from tqdm import tqdm

from cluster.bench.facts import overview, say
from cluster.bench.http_stream import HttpClientConnection
from cluster.bench.load import GRPC, Monitor, Target, closed_loop, timed_arrivals
from cluster.bench.measure import Result, Run, Slo, Summary, milliseconds, summarise
from cluster.bench.workload import (
    Ask,
    Style,
    at_rate,
    cut_window,
    drawn_arrivals,
    fit_trace,
    mean_rate,
    read_trace,
    scale_lengths,
    spread_ticks,
)
from cluster.client_tls import ClientTls, client_tls
from protocol.errors import InvalidRequest, Unavailable

#: Of closed loops without --concurrency.
_CLIENTS = (1, 4, 16)
#: Requests of an open loop without a trace.
_OPEN_REQUESTS = 200
#: Numbers of the requests of one run: none is used twice, so that no prompt is sent twice.
_RUN_NUMBERS = 1_000_000
#: Doublings and halvings of one search.
_MAX_STEPS = 16
#: A search ends when the rates that are enough and not enough differ by less than this factor.
_PRECISION = 1.1


class RateSearch:
    """The highest rate at which a server keeps its promises: doubling, then halving. Ask
    `next_rate`, measure there, `add` the share of requests that kept every promise.

    start: the first rate. wanted: the share that is enough.
    """

    def __init__(self, start: float, *, wanted: float = 0.9) -> None:
        if start <= 0 or not 0 < wanted <= 1:
            raise ValueError("needs start > 0 and 0 < wanted <= 1")
        self.best = 0.0
        self._start = start
        self._wanted = wanted
        self._too_high = math.inf
        self._steps = 0

    def next_rate(self) -> float | None:
        """The rate to measure next; None when the search is over."""
        if self._steps == _MAX_STEPS or self._too_high < self.best * _PRECISION:
            return None
        if self._too_high == math.inf:
            return self.best * 2 or self._start
        return math.sqrt(self.best * self._too_high) if self.best else self._too_high / 2

    def add(self, rate: float, kept: float) -> None:
        """Take in what was measured at a rate."""
        self._steps += 1
        if kept >= self._wanted:
            self.best = max(self.best, rate)
        else:
            self._too_high = min(self._too_high, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, its last repeat's requests and how late the generator was. `rate`: requests a second
    of an open loop."""

    run: Run
    results: Sequence[Result]
    lag_ms: dict[str, float]
    rate: float | None = None


def slo_of(options: argparse.Namespace) -> Slo | None:
    """The promises that are counted, None without any."""
    given = {name: getattr(options, f"slo_{name}") for name in ("ttft", "tpot", "gap", "e2e")}
    promised = {name: seconds for name, seconds in given.items() if seconds is not None}
    return Slo(**promised) if promised else None


def measure_now(options: argparse.Namespace) -> list[Measured]:
    """All runs, in an event loop of their own. Raises Unavailable without a server."""
    try:
        return uvloop.run(measure(options))
    except OSError as error:
        answered = str(error).startswith("HTTP ")
        hint = "" if answered else " (if it wants TLS: --tls or --tls-ca, https:// in a URL)"
        raise Unavailable(f"{options.url}: {error}{hint}") from None


async def measure(options: argparse.Namespace) -> list[Measured]:
    """All runs, each announced as it ends. Raises InvalidRequest for options that do not fit."""
    _check_url(options.url)
    if options.find_rate is not None and slo_of(options) is None:
        raise InvalidRequest("--find-rate needs a promise, such as --slo-ttft", param="--find-rate")
    if options.concurrency and (options.find_rate or options.trace or options.rate):
        raise InvalidRequest(
            "--concurrency is of closed loops: without --rate, --trace and --find-rate",
            param="--concurrency",
        )
    if not options.model and not options.url.startswith(GRPC):
        options.model = await first_model(options.url, options.api_key, client_tls(options))
    if options.find_rate is not None:
        return await _find_rate(options)
    if options.trace or options.rate:
        asks = open_loop(options, options.rate)
        return [await _open(options, asks, number=1)]
    options.concurrency = options.concurrency or _CLIENTS
    return [await _closed(options, clients) for clients in options.concurrency]


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https", "grpc") and parts.hostname and parts.port != 0
    except ValueError:  # no such port
        fits = False
    if not fits:
        expected = "http(s)://HOST:PORT or grpc://HOST:PORT"
        raise InvalidRequest(f"{url}: expected {expected}", param="server")


def open_loop(options: argparse.Namespace, rate: float | None) -> list[Ask]:
    """The requests of an open loop, at their times."""
    if options.trace is None:
        ask = Ask(prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens)
        rate = rate or 1.0
        enough = math.ceil(rate * options.min_seconds) if options.find_rate else 0
        asks = [ask] * (options.requests or max(_OPEN_REQUESTS, enough))
        return drawn_arrivals(asks, rate, cv=options.cv or 1.0, seed=options.seed)
    try:
        asks = read_trace(options.trace)
        if options.spread_ticks:
            asks = spread_ticks(asks)
        if options.window:
            asks = cut_window(asks, *options.window)
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"{options.trace}: {why}", param="--trace") from None
    asks = asks[options.first : options.first + (options.requests or options.limit)]
    if not asks:
        raise InvalidRequest(f"the trace has no request {options.first}", param="--first")
    asks = fit_trace(
        scale_lengths(asks, options.input_scale, options.output_scale),
        limit=len(asks),
        speed=options.speed,
        max_prompt=options.prompt_tokens,
        max_output=options.output_tokens,
    )
    if options.cv:
        return drawn_arrivals(asks, rate or mean_rate(asks), cv=options.cv, seed=options.seed)
    return asks if rate is None else at_rate(asks, rate)


async def _find_rate(options: argparse.Namespace) -> list[Measured]:
    start = options.rate or (mean_rate(open_loop(options, None)) if options.trace else 1.0)
    search = RateSearch(start, wanted=options.find_rate)
    measured: list[Measured] = []
    while (rate := search.next_rate()) is not None:
        asks = open_loop(options, rate)
        length_s = asks[-1].at
        if measured and length_s < 0.8 * options.min_seconds:
            say(
                f"{len(asks)} requests last {length_s:.1f} s at {rate:.3g}/s: the search needs more"
            )
            break
        one = await _open(options, asks, number=len(measured) + 1)
        measured.append(one)
        search.add(rate, one.run.repeats[-1].kept["all"])
    share = f"{options.find_rate:.0%} of the requests good"
    say(f"highest rate with {share}: {search.best:.3g} a second")
    return sorted(measured, key=lambda one: one.rate or 0.0)


async def _warm_up(
    target: Target, asks: Sequence[Ask], *, clients: int, first_number: int = 0
) -> None:
    """Requests that are not measured. Raises Unavailable where all fail: so would the others."""
    results = await closed_loop(target, asks, concurrency=clients, first_number=first_number)
    errors = [result.error for result in results if result.error]
    if errors and len(errors) == len(results):
        raise Unavailable(f"{target.url}: every request of the warm-up failed: {errors[0]}")


async def _open(options: argparse.Namespace, asks: Sequence[Ask], *, number: int) -> Measured:
    target = target_of(options)
    if options.warmup and number == 1:
        await _warm_up(target, asks[: options.warmup], clients=1)
    name = options.trace.name if options.trace else "Poisson" if not options.cv else "Gamma"
    label = f"{name}, {mean_rate(asks):.3g}/s"
    with tqdm(total=len(asks), desc=label, leave=False, disable=None) as bar:
        monitor = Monitor(on_end=bar.update)
        first = number * _RUN_NUMBERS
        results = await timed_arrivals(target, asks, first_number=first, monitor=monitor)
    summary = summarise(results, slo_of(options))
    say(overview(label, [summary]))
    run = Run(
        label=label,
        prompt_tokens=summary.prompt_tokens,
        output_tokens=summary.output_tokens,
        concurrency=None,
        repeats=(summary,),
    )
    lag_ms = lag_of(monitor)
    return Measured(run=run, results=results, lag_ms=lag_ms, rate=mean_rate(asks))


async def _closed(options: argparse.Namespace, clients: int) -> Measured:
    ask = Ask(prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens)
    count = options.requests or max(8, 4 * clients)
    target, slo = target_of(options), slo_of(options)
    # Numbers determine the prompts: none is sent twice in a run, so no prefix cache can help.
    first = _RUN_NUMBERS * clients
    warm = [ask] * (options.warmup * clients)
    if warm:
        await _warm_up(target, warm, clients=clients, first_number=first)
    label = f"{clients} client{'s' if clients > 1 else ''}"
    summaries: list[Summary] = []
    monitor, results = Monitor(), list[Result]()
    for _ in range(options.repeats):
        first += max(count, len(warm))
        with tqdm(total=count, desc=label, leave=False, disable=None) as bar:
            monitor.on_end = bar.update
            results = await closed_loop(
                target, [ask] * count, concurrency=clients, first_number=first, monitor=monitor
            )
        summaries.append(summarise(results, slo))
        say(overview(label, summaries))
    run = Run(
        label=label,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        concurrency=clients,
        repeats=tuple(summaries),
    )
    return Measured(run=run, results=results, lag_ms=lag_of(monitor))


def lag_of(monitor: Monitor) -> dict[str, float]:
    """The generator's lag in milliseconds: percentiles and the largest."""
    return milliseconds(monitor.lags) | {"max": max(monitor.lags, default=0.0) * 1000}


def target_of(options: argparse.Namespace) -> Target:
    """The server, and how it is asked."""
    style = Style(
        api=options.api,
        text=options.text,
        model=options.model,
        vocab_size=options.vocab_size,
        seed=options.seed,
        temperature=options.temperature,
        ignore_eos=not options.respect_eos,
    )
    return Target(
        url=options.url,
        style=style,
        timeout_s=options.timeout,
        api_key=options.api_key or "",
        tls=client_tls(options),
    )


async def first_model(url: str, api_key: str | None = None, tls: ClientTls | None = None) -> str:
    """The first model that the server lists. Raises OSError when it does not."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = HttpClientConnection(url, headers, tls)
    try:
        answer = await connection.get("/v1/models", timeout_s=30)
    finally:
        connection.close()
    if answer.status != 200:
        raise ConnectionError(f"HTTP {answer.status}: {answer.body.decode(errors='replace')}")
    return str(json.loads(answer.body)["data"][0]["id"])
