"""`python -m benchmarks.simulate --trace FILE`: goodput of a deployment before it exists."""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

from benchmarks.simulate.devices import H200_8B_SERVING
from benchmarks.simulate.world import Request, Setup, World
from cluster.bench.measure import Slo
from cluster.bench.workload import Ask, fit_trace, read_trace
from cluster.config.load import load_config

_SLOS = ("200/20", "200/20/50", "200/20/30", "200/20/20", "200/20/12", "500/20", "200/10", "100/10")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate")
    parser.add_argument("--config", type=Path, default=Path("deploy/configs/gpu-1p1d.yaml"))
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--speeds", default="1")
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument(
        "--strict",
        type=_strict,
        metavar="EVERY/GAP",
        help="promise every so many requests a longest gap of so many milliseconds",
    )
    parser.add_argument(
        "--first-tokens",
        type=_milliseconds,
        default=[],
        metavar="MS,MS,...",
        help="promise requests, in turn, a first token within so many milliseconds",
    )
    return parser.parse_args()


def main() -> None:
    """Print a line for each speed."""
    options = _options()
    config = load_config(options.config, overrides=options.overrides).config
    setup = Setup(
        step_time=H200_8B_SERVING,
        num_prefill=config.prefill.replicas,
        num_decode=config.decode.replicas,
        prefill=config.prefill.worker,
        decode=config.decode.worker,
        router=config.router.settings,
        step_rows=H200_8B_SERVING.step_rows,
    )
    print("good of all at", *_SLOS, sep="  ")
    for speed in map(float, options.speeds.split(",")):
        asks = fit_trace(
            read_trace(options.trace)[options.first :],
            limit=options.limit,
            speed=speed,
            max_prompt=options.prompt_tokens,
            max_output=1 << 20,
        )
        if options.strict is None:
            _print_promised(f"x{speed:g}", setup, asks, options.first_tokens)
            continue
        every, gap_s = options.strict
        gaps_s = [None if number % every else gap_s for number in range(len(asks))]
        requests = World(setup, asks, gaps_s).run()
        tiers = {"strict": True, "loose": False}
        for tier, strict in tiers.items():
            chosen = [r for r, gap in zip(requests, gaps_s, strict=True) if strict is bool(gap)]
            kept = sum(figures(request)[2] <= gap_s for request in chosen)
            print(f"x{speed:g} {tier}: {kept} of {len(chosen)} keep it ", describe(chosen))


def _print_promised(name: str, setup: Setup, asks: list[Ask], firsts_s: list[float]) -> None:
    """Good requests, of all and of those of each promised first token."""
    promised = [firsts_s[i % len(firsts_s)] for i in range(len(asks))] if firsts_s else []
    requests = World(setup, asks, firsts_s=promised).run()
    print(name, describe(requests))
    for first_s in firsts_s:
        chosen = [r for r, each in zip(requests, promised, strict=True) if each == first_s]
        good = sum(within(figures(r), Slo(ttft=first_s, tpot=0.02)) for r in chosen)
        print(f"    {good} of {len(chosen)} with their first token in {first_s:g} s, TPOT 20 ms")


def _strict(text: str) -> tuple[int, float]:
    """Every how many requests, and the seconds of the gap that they are promised."""
    every, gap_ms = text.split("/")
    return int(every), float(gap_ms) / 1000


def _milliseconds(text: str) -> list[float]:
    return [float(part) / 1000 for part in text.split(",")]


def describe(requests: list[Request]) -> str:
    """Requests within each promise, and percentiles in milliseconds."""
    rows = [figures(request) for request in requests]
    good = [str(sum(within(row, slo) for row in rows)) for slo in map(slo_of, _SLOS)]
    ttft, tpot, gap = (
        "/".join(f"{1000 * percentile([row[i] for row in rows], p):.1f}" for p in (50, 99))
        for i in range(3)
    )
    local = sum(request.local for request in requests)
    return f"{' '.join(good)}  TTFT {ttft}  TPOT {tpot}  longest gap {gap}  on decode {local}"


def figures(request: Request) -> tuple[float, float, float]:
    """TTFT, mean inter-token time and longest gap, in seconds."""
    times = request.times
    assert len(times) == request.ask.output_tokens
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return times[0] - request.sent, mean, max(gaps, default=0.0)


def slo_of(text: str) -> Slo:
    """TTFT/TPOT[/GAP] in milliseconds."""
    ttft, tpot, *gap = (float(part) / 1000 for part in text.split("/"))
    return Slo(ttft=ttft, tpot=tpot, gap=min(gap, default=math.inf))


def within(row: tuple[float, float, float], slo: Slo) -> bool:
    """Whether a request keeps a promise."""
    return row[0] <= slo.ttft and row[1] <= slo.tpot and row[2] <= slo.gap


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, percent * len(values) // 100)]


if __name__ == "__main__":
    main()
