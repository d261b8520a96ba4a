"""A report as one HTML page that needs nothing else: tables and charts in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from cluster.bench.runs import Measured

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 250, 48, 34
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1340px; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
td, th { border: 1px solid #8884; padding: .25em .6em; text-align: left }
svg { margin: .5em } text { font: 11px system-ui, sans-serif; fill: currentColor }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 } }
"""
#: Charts of all requests of each run: figure, title.
_CHARTS = (
    ("ttft", "Time to first token, ms"),
    ("tpot", "Time a token after the first, ms"),
    ("gap", "Longest gap of a request, ms"),
    ("e2e", "End to end, ms"),
)

Points = Sequence[tuple[float, float]]


def page(
    about: Mapping[str, str], lines: Sequence[Sequence[str]], measured: Sequence[Measured]
) -> str:
    title = f"baton bench: {about.get('model') or 'model'}, {about['date']}"
    facts = "".join(f"<tr><th>{escape(k)}<td>{escape(str(v))}" for k, v in about.items() if v)
    head, *rest = lines
    table = "<tr>" + "".join(f"<th>{escape(cell)}" for cell in head)
    table += "".join("<tr>" + "".join(f"<td>{escape(c)}" for c in line) for line in rest)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f"<table>{table}</table><p>Latencies are p50 / p90 / p99.</p>"
        f"{''.join(_charts(measured))}<table>{facts}</table></html>\n"
    )


def _charts(measured: Sequence[Measured]) -> Iterator[str]:
    kept = [
        (one.rate, 100 * one.run.repeats[-1].kept["all"])
        for one in measured
        if one.rate is not None and one.run.repeats[-1].kept
    ]
    if len(kept) > 1:
        yield chart("Good requests, %, by requests a second", {"all promises": kept}, top=100)
    for name, title in _CHARTS:
        series = {one.run.label: distribution(one, name) for one in measured}
        yield chart(title + ": share of requests, %", series, top=100)
    for one in measured[-1:]:
        good = [result for result in one.results if not result.error]
        began = min((result.sent for result in good), default=0.0)
        times = sorted((result.sent - began, 1000 * result.ttft) for result in good)
        yield chart("TTFT in ms by seconds since the start", {one.run.label: times}, dots=True)


def distribution(one: Measured, name: str) -> Points:
    """Milliseconds, and the percent of the requests that took no longer."""
    values = sorted(1000 * r.figure(name) for r in one.results if not r.error)
    return [(value, 100 * (i + 1) / len(values)) for i, value in enumerate(values)]


def chart(title: str, series: Mapping[str, Points], *, top: float = 0.0, dots: bool = False) -> str:
    """One chart: lines, or dots, from (0, 0) to the largest values."""
    points = [point for line in series.values() for point in line]
    max_x = max((x for x, _ in points), default=0.0) or 1.0
    max_y = top or max((y for _, y in points), default=0.0) or 1.0
    width, height = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - 26

    def place(x: float, y: float) -> str:
        return f"{_LEFT + width * x / max_x:.1f},{26 + height * (1 - y / max_y):.1f}"

    parts = [f'<text x="{_LEFT}" y="14">{escape(title)}</text>']
    for i in range(5):
        x, y = max_x * i / 4, max_y * i / 4
        left, low = place(0, y).split(","), place(x, 0).split(",")
        parts.append(
            f'<path d="M{place(0, y)} L{place(max_x, y)}" stroke="#8884"/>'
            f'<text x="{_LEFT - 4}" y="{float(left[1]) + 4}" text-anchor="end">{y:.4g}</text>'
            f'<text x="{low[0]}" y="{float(low[1]) + 14}" text-anchor="middle">{x:.4g}</text>'
        )
    for number, (label, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        if dots:
            for x, y in line:
                cx, cy = place(x, y).split(",")
                parts.append(f'<circle cx="{cx}" cy="{cy}" r="2" fill="{colour}"/>')
        elif line:
            drawn = " L".join(place(x, y) for x, y in line)
            parts.append(f'<path d="M{drawn}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        across = _LEFT + 8 + 190 * (number % 2)
        if len(series) > 1:
            parts.append(
                f'<text x="{across}" y="{38 + 12 * (number // 2)}" style="fill:{colour}">'
                f"{escape(label)}</text>"
            )
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(parts)}</svg>'
