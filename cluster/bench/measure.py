"""What one request's answer says, and what many of them say together.

Definitions: content is text, thoughts and parts of a character included; TTFT = send to first chunk
with content; TPOT = (end-to-end - TTFT) / (tokens - 1) of a request; ITL = gaps between chunks with
content, pooled over all requests; E2E = send to last chunk with content; output tokens/s = all
output tokens / wall seconds from the first send to the last end; longest gap = the largest ITL of a
request; goodput = requests that kept every promise / wall seconds, failures counted as not kept.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.bench.http_stream import Answer

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One request. Times in seconds of time.perf_counter; `error` is empty when it went well.
    `timeline` is the server's own timeline of the request, if requested."""

    sent: float
    ended: float
    chunk_times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    timeline: dict[str, Any] | None = None

    @property
    def ttft(self) -> float:
        """Send to first chunk with content."""
        return self.chunk_times[0] - self.sent

    @property
    def e2e(self) -> float:
        """Send to last chunk with content."""
        return self.chunk_times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds an output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive chunks with content."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    def figure(self, name: str) -> float:
        """ttft, tpot, gap (the longest) or e2e, in seconds; 0 where there is none."""
        if name == "gap":
            return max(self.gaps, default=0.0)
        return float(getattr(self, name) or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must keep to count as good: seconds to first token, a token after it on
    average, of any one gap, and end to end."""

    ttft: float = math.inf
    tpot: float = math.inf
    gap: float = math.inf
    e2e: float = math.inf

    def kept_by(self, result: Result) -> dict[str, bool]:
        """Each promise, and whether a request kept it; a failed one keeps none."""
        promised = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            name: not result.error and result.figure(name) <= seconds
            for name, seconds in promised.items()
            if seconds < math.inf
        }

    def met_by(self, result: Result) -> bool:
        """Whether a request kept every promise; a failed one never does."""
        return not result.error and all(self.kept_by(result).values())


def read_answer(answer: Answer, *, expected_tokens: int | None) -> Result:
    """The result of one streamed answer. `expected_tokens` is checked when given."""
    if answer.status != 200:
        text = answer.body.decode(errors="replace")[:200]
        return _failed(answer, f"HTTP {answer.status}: {text}")
    times: list[float] = []
    usage: dict[str, Any] = {}
    timeline: dict[str, Any] | None = None
    finished = False
    for when, data in answer.events():
        if data == "[DONE]":
            finished = True
            continue
        event = json.loads(data)
        if "error" in event:
            return _failed(answer, f"error event: {event['error'].get('message', '')[:200]}")
        usage = event.get("usage") or usage
        timeline = event.get("timeline") or timeline
        if any(_content(choice) for choice in event.get("choices", ())):
            times.append(when)
    tokens = int(usage.get("completion_tokens", len(times)))
    problem = _problem(finished, times, tokens, expected_tokens)
    if problem:
        return _failed(answer, problem)
    return Result(
        sent=answer.sent,
        ended=answer.ended,
        chunk_times=tuple(times),
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        output_tokens=tokens,
        timeline=timeline,
    )


def _problem(finished: bool, times: list[float], tokens: int, expected: int | None) -> str:
    if not finished:
        return "the stream ended without [DONE]"
    if not times:
        return "no content"
    if expected is not None and tokens != expected:
        return f"{tokens} output tokens instead of {expected}"
    return ""


def _failed(answer: Answer, error: str) -> Result:
    return Result(sent=answer.sent, ended=answer.ended, error=error)


def _content(choice: dict[str, Any]) -> bool:
    """Whether a chunk brings a token. Its text is empty while its character is incomplete; that of
    the chunk in which a chat begins, or of one that only says why an output ended, is none."""
    delta = choice.get("delta") or {}
    texts = choice.get("text"), delta.get("content")
    if any(texts) or delta.get("reasoning_content") or delta.get("reasoning"):
        return True
    return "" in texts and "role" not in delta and choice.get("finish_reason") is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Many requests together. Latencies in milliseconds: {"p50": ..., "p90": ..., "p99": ...}.
    `kept`: the share of requests that kept each promise, and `all` of them."""

    requests: int
    failures: int
    errors: dict[str, int]
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    longest_gap_ms: dict[str, float]
    max_gap_ms: float
    goodput_per_s: float | None = None
    kept: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One line of a report: what was sent, and every repeat's summary."""

    label: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None
    repeats: tuple[Summary, ...]


def summarise(results: Sequence[Result], slo: Slo | None = None) -> Summary:
    """All results of one run. Raises ValueError when there are none."""
    if not results:
        raise ValueError("no request was sent")
    good = [result for result in results if not result.error]
    wall = max(r.ended for r in results) - min(r.sent for r in results)
    gaps = [gap for result in good for gap in result.gaps]
    tokens = sum(result.output_tokens for result in good)
    return Summary(
        requests=len(results),
        failures=len(results) - len(good),
        errors=dict(Counter(result.error for result in results if result.error)),
        wall_s=wall,
        prompt_tokens=sum(result.prompt_tokens for result in good),
        output_tokens=tokens,
        output_tokens_per_s=tokens / wall if wall else 0.0,
        requests_per_s=len(good) / wall if wall else 0.0,
        ttft_ms=milliseconds([result.ttft for result in good]),
        tpot_ms=milliseconds([r.tpot for r in good if r.tpot is not None]),
        itl_ms=milliseconds(gaps),
        e2e_ms=milliseconds([result.e2e for result in good]),
        longest_gap_ms=milliseconds([result.figure("gap") for result in good]),
        max_gap_ms=max(gaps, default=0.0) * 1000,
        goodput_per_s=None if slo is None else sum(map(slo.met_by, results)) / wall,
        kept={} if slo is None else _kept(results, slo),
    )


def _kept(results: Sequence[Result], slo: Slo) -> dict[str, float]:
    outcomes = [slo.kept_by(result) for result in results]
    counts = Counter(name for kept in outcomes for name, is_kept in kept.items() if is_kept)
    counts["all"] = sum(map(slo.met_by, results))
    return {name: counts[name] / len(results) for name in (*outcomes[0], "all")}


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles of some times."""
    ordered = sorted(seconds)
    return {f"p{p}": percentile(ordered, p) * 1000 for p in PERCENTILES}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of a sorted sequence, with linear interpolation; 0 of an empty one."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
