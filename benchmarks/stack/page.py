"""What replays of a trace say, as Markdown and as figures: goodput, phases, a timeline, checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.stack.checks import Check
from cluster.bench.facts import table, times
from cluster.bench.measure import Result, Slo, milliseconds
from cluster.bench.workload import Ask
from protocol.ids import Role
from protocol.timeline import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """A `baton` command that was run during a replay, `at` seconds into it; seconds it took."""

    command: str
    at: float
    took: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One pass over a window of a trace, counted from 1; results are in the order of the asks."""

    window: str
    number: int = 1
    speed: float
    asks: tuple[Ask, ...]
    results: tuple[Result, ...]
    acts: tuple[Act, ...] = ()

    @property
    def name(self) -> str:
        """Its window and speed."""
        return f"{self.window} x{self.speed:g}"

    @property
    def good(self) -> list[Result]:
        """Those without an error."""
        return [result for result in self.results if not result.error]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One configuration that was run. up_s: seconds of `baton up`."""

    name: str
    overrides: tuple[str, ...]
    up_s: float = 0.0
    replays: tuple[Replay, ...] = ()
    checks: tuple[Check, ...] = ()
    error: str = ""

    @property
    def sound(self) -> bool:
        """Whether every check held."""
        return all(check.ok for check in self.checks)


def details(variants: Sequence[Variant], slos: Sequence[Slo]) -> str:
    """The page below the table of runs."""
    parts = [_goodput(variants, slos), _phases(variants)]
    for variant in variants:
        parts.append(_checks(variant))
        parts += [_workers(variant, replay) for replay in variant.replays if replay.acts]
        parts += [_timeline(variant, replay) for replay in variant.replays[:1] if replay.good]
    return "\n".join(parts)


def _goodput(variants: Sequence[Variant], slos: Sequence[Slo]) -> str:
    """Share of requests within each SLO, and the longest gap that most requests saw."""
    names = [_slo(slo) for slo in slos]
    rows = []
    for variant, replay in _replays(variants):
        met = [sum(map(slo.met_by, replay.results)) for slo in slos]
        wall = max(r.ended for r in replay.results) - min(r.sent for r in replay.results)
        longest = sorted(max(r.gaps, default=0.0) for r in replay.good)
        second = sorted(r.gaps[0] for r in replay.good if r.gaps)
        cells = [f"{n}/{len(replay.results)} ({n / wall:.2f}/s)" for n in met]
        gaps = [_ms(values) for values in (longest, second, handed_over(replay.good))]
        rows.append([f"{variant.name}, {replay.name}", *cells, *gaps])
    longest_gap, to_second = "longest gap of a request, ms", "token 1 to token 2, ms"
    head = ["run", *names, longest_gap, to_second, "end of prefill to decode owning it, ms"]
    return f"## Goodput and gaps (p50 / p90 / p99)\n\n{table(head, rows)}"


def _slo(slo: Slo) -> str:
    text = f"TTFT <= {slo.ttft * 1e3:g} ms, TPOT <= {slo.tpot * 1e3:g} ms"
    return text if math.isinf(slo.gap) else f"{text}, every gap <= {slo.gap * 1e3:g} ms"


def _phases(variants: Sequence[Variant]) -> str:
    rows = []
    for variant, replay in _replays(variants):
        found = phases(replay.good)
        cells = (_ms(found[phase]) if phase in found else "" for phase in Phase)
        rows.append([f"{variant.name}, {replay.name}", *cells])
    return f"## Phases of all requests, ms (p50 / p90 / p99)\n\n{table(['run', *Phase], rows)}"


def phases(results: Sequence[Result]) -> dict[Phase, list[float]]:
    """Seconds of each phase of each request, sorted."""
    found: dict[Phase, list[float]] = {}
    for result in results:
        for span in (result.timeline or {}).get("spans", ()):
            found.setdefault(Phase(span["phase"]), []).append(_seconds(span))
    return {phase: sorted(found[phase]) for phase in Phase if phase in found}


def handed_over(results: Sequence[Result]) -> list[float]:
    """Seconds from the end of prefill to the step thread of decode taking the sequence, sorted."""
    found = []
    for result in results:
        spans = {span["phase"]: span for span in (result.timeline or {}).get("spans", ())}
        if Phase.PREFILL in spans and Phase.DECODE_QUEUE in spans:
            found.append(spans[Phase.DECODE_QUEUE]["start"] - spans[Phase.PREFILL]["end"])
    return sorted(found)


def _workers(variant: Variant, replay: Replay) -> str:
    """Which worker served when: the effect of a change of scale or roles."""
    served: dict[tuple[str, str], list[float]] = {}
    for phase, place, began in _work(replay):
        served.setdefault((phase, place), []).append(began)
    rows = [
        [phase, place, str(len(began)), f"{min(began):.1f}", f"{max(began):.1f}"]
        for (phase, place), began in sorted(served.items())
    ]
    moved = [result for result in replay.good if _num_decoders(result) > 1]
    head = ["phase", "worker", "requests", "the first began at s", "the last at s"]
    gaps = "".join(
        f"Longest gap of {what}: {_longest_gap(results) * 1e3:.1f} ms.\n"
        for what, results in (
            ("any stream", replay.good),
            (f"the {len(moved)} streams that moved", moved),
        )
    )
    title = f"## {variant.name}, {replay.name}: who served when\n\n"
    return f"{title}{table(head, rows)}\n{gaps}{''.join(_new_roles(replay))}"


def _work(replay: Replay) -> Iterator[tuple[str, str, float]]:
    """Phase, worker and beginning of all work, in seconds of the replay."""
    for ask, result in zip(replay.asks, replay.results, strict=True):
        timeline = result.timeline or {}
        for span in timeline.get("spans", ()):
            if span["phase"] in (Phase.PREFILL, Phase.LOCAL_PREFILL, Phase.DECODE):
                began = ask.at + span["start"] - timeline["arrival"]
                yield span["phase"], span.get("place", ""), began


def _new_roles(replay: Replay) -> Iterator[str]:
    """For each role that a worker was given: when it first worked in it."""
    for act in replay.acts:
        command, *rest = act.command.split()
        if command == "role":
            place, role = rest
            phases = (
                {Phase.PREFILL} if role == Role.PREFILL else {Phase.LOCAL_PREFILL, Phase.DECODE}
            )
            later = [
                began - act.at
                for phase, where, began in _work(replay)
                if where == place and phase in phases and began > act.at
            ]
            first = f"{min(later):.2f} s after" if later else "never after"
            yield f"{place} first worked as {role} {first} `baton {act.command}` began.\n"


def _num_decoders(result: Result) -> int:
    spans = (result.timeline or {}).get("spans", ())
    return len({span.get("place", "") for span in spans if span["phase"] == Phase.DECODE})


def _longest_gap(results: Sequence[Result]) -> float:
    return max((gap for result in results for gap in result.gaps), default=0.0)


def _timeline(variant: Variant, replay: Replay) -> str:
    """The request of median latency among those that passed through all phases."""
    ordered = sorted(replay.good, key=lambda result: (_num_spans(result), result.e2e))
    most = [r for r in ordered if _num_spans(r) == _num_spans(ordered[-1])]
    result = most[len(most) // 2]
    timeline = result.timeline or {}
    arrival = timeline.get("arrival", 0.0)
    rows = [
        [
            span["phase"],
            f"{(span['start'] - arrival) * 1e3:.2f}",
            f"{_seconds(span) * 1e3:.2f}",
            span.get("place", "") or "router",
            ", ".join(f"{name} {count}" for name, count in sorted(span.get("counts", {}).items())),
        ]
        for span in timeline.get("spans", ())
    ]
    title = (
        f"## {variant.name}: one request, {result.prompt_tokens} + {result.output_tokens} tokens, "
        f"TTFT {result.ttft * 1e3:.1f} ms, all {result.e2e * 1e3:.1f} ms at its client\n\n"
    )
    return title + table(["phase", "at ms", "for ms", "where", "what"], rows)


def _checks(variant: Variant) -> str:
    rows = [[check.what, check.seen, "yes" if check.ok else "**no**"] for check in variant.checks]
    settings = ", ".join(f"`{override}`" for override in variant.overrides) or "as configured"
    failed = f"\n**Did not finish: {variant.error}**\n" if variant.error else ""
    acts = "".join(
        f"\n`baton {act.command}` {act.at:g} s into {replay.name} took {act.took:.1f} s.\n"
        for replay in variant.replays
        for act in replay.acts
    )
    title = f"## {variant.name}: {settings}; up in {variant.up_s:.1f} s\n{failed}{acts}\n"
    return title + table(["what must hold", "seen", "holds"], rows)


def raw(variants: Sequence[Variant]) -> dict[str, Any]:
    """The figures behind the page, for each request in milliseconds."""
    return {
        variant.name: {
            "overrides": variant.overrides,
            "up_s": variant.up_s,
            "error": variant.error,
            "checks": [asdict(check) for check in variant.checks],
            "replays": [
                {
                    "window": replay.window,
                    "speed": replay.speed,
                    "acts": [asdict(act) for act in replay.acts],
                    "requests": list(_requests(replay)),
                }
                for replay in variant.replays
            ],
        }
        for variant in variants
    }


def _requests(replay: Replay) -> Iterator[dict[str, Any]]:
    for ask, result in zip(replay.asks, replay.results, strict=True):
        request = {"at": round(ask.at, 3), "in": ask.prompt_tokens, "out": ask.output_tokens}
        if result.error:
            yield request | {"error": result.error}
            continue
        times = {
            "ttft": result.ttft,
            "tpot": result.tpot or 0.0,
            "e2e": result.e2e,
            "max_gap": max(result.gaps, default=0.0),
            "second": next(iter(result.gaps), 0.0),
        }
        times |= {phase: sum(spent) for phase, spent in phases([result]).items()}
        yield request | {name: round(1e3 * value, 2) for name, value in times.items()}


def _replays(variants: Sequence[Variant]) -> Iterator[tuple[Variant, Replay]]:
    for variant in variants:
        for replay in variant.replays:
            yield variant, replay


def _num_spans(result: Result) -> int:
    return len((result.timeline or {}).get("spans", ()))


def _seconds(span: dict[str, Any]) -> float:
    return float(span["end"] - span["start"])


def _ms(seconds: Sequence[float]) -> str:
    return times(milliseconds(seconds))
