"""A request's timeline as a table."""

from __future__ import annotations

from cluster.cli.console import Console
from cluster.client import GenerateOutcome
from protocol.timeline import Phase
from protocol.wire import inference_pb2 as wire

_NAMES: dict[str, str] = {
    Phase.TOKENIZE: "tokenise",
    Phase.ROUTE: "route",
    Phase.QUEUE: "wait for a turn",
    Phase.CREDIT_WAIT: "wait for decode credits",
    Phase.PREFILL_QUEUE: "prefill queue",
    Phase.PREFILL: "prefill",
    Phase.TRANSFER: "KV transfer",
    Phase.DECODE_QUEUE: "wait for a decode step",
    Phase.DECODE: "decode",
    Phase.LOCAL_PREFILL: "prefill on decode",
}


def show_timeline(timeline: wire.Timeline, outcome: GenerateOutcome, console: Console) -> None:
    """Every phase with its start after arrival, its length, its place and its counts."""
    spans = sorted(timeline.spans, key=lambda span: (span.start, span.end))
    rows = [
        (
            _NAMES.get(span.phase, span.phase),
            f"{1e3 * (span.start - timeline.arrival):.1f}",
            f"{1e3 * (span.end - span.start):.1f}",
            span.place or "router",
            _details(span),
        )
        for span in spans
    ]
    console.table(("PHASE", "AT MS", "FOR MS", "WHERE", "WHAT"), rows)
    console.say(_summary(timeline, outcome))


def _details(span: wire.Span) -> str:
    parts = [_count(name, span.counts[name]) for name in sorted(span.counts)]
    if span.note:
        parts.append(span.note)
    return ", ".join(parts)


def _count(name: str, value: int) -> str:
    if name == "bytes":
        return f"{value / 1e6:.2f} MB" if value >= 100_000 else f"{value} bytes"
    return f"{value} {name if value != 1 else name.removesuffix('s')}"


def _summary(timeline: wire.Timeline, outcome: GenerateOutcome) -> str:
    first = timeline.first_token - timeline.arrival
    total = timeline.end - timeline.arrival
    text = f"first token after {1e3 * first:.0f} ms, all after {1e3 * total:.0f} ms"
    rest = outcome.completion_tokens - 1
    if rest > 0 and total > first:
        text += f", {1e3 * (total - first) / rest:.1f} ms per further token"
    tokens = f"{outcome.prompt_tokens} prompt + {outcome.completion_tokens} output tokens"
    return f"{tokens}: {text}"
