"""What `python -m benchmarks.stack` is asked to run."""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from cluster.bench.measure import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One variant to run: a name and what it overrides."""

    name: str
    overrides: tuple[str, ...]


def plan_of(text: str) -> Plan:
    name, *overrides = shlex.split(text)
    return Plan(name=name, overrides=tuple(overrides))


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """Arguments of `baton` for `at` seconds into a replay: into each, or one, counted from 1."""

    at: float
    replay: int | None = None
    arguments: tuple[str, ...]

    @property
    def looks_up(self) -> bool:
        """Whether a worker is named by its role."""
        return any(argument.startswith("@") for argument in self.arguments)


def later_of(text: str) -> Later:
    when, *arguments = shlex.split(text)
    at, _, replay = when.partition("@")
    return Later(at=float(at), replay=int(replay) if replay else None, arguments=tuple(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive requests of a trace, replayed once at each speed."""

    name: str
    trace: Path
    first: int
    limit: int
    speeds: tuple[float, ...]

    @property
    def described(self) -> str:
        return f"requests {self.first} to {self.first + self.limit - 1} of {self.trace.name}"


def window_of(text: str) -> Window:
    name, trace, first, limit, speeds = shlex.split(text)
    return Window(
        name=name,
        trace=Path(trace),
        first=int(first),
        limit=int(limit),
        speeds=tuple(map(float, speeds.split(","))),
    )


def split_of(text: str) -> tuple[int, int]:
    prefill, decode = text.split("+")
    return int(prefill), int(decode)


def slo_of(text: str) -> Slo:
    ttft, tpot, *gap = (float(part) / 1000 for part in text.split("/"))
    return Slo(ttft=ttft, tpot=tpot, gap=min(gap, default=math.inf))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.stack")
    made.add_argument("config", help="as for `baton up`")
    made.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE")
    made.add_argument(
        "--variant",
        dest="plans",
        action="append",
        type=plan_of,
        metavar="'NAME FIELD=VALUE ...'",
        help="one more run of everything (repeatable; default: the configuration as it is)",
    )
    made.add_argument(
        "--window",
        dest="windows",
        action="append",
        required=True,
        type=window_of,
        metavar="'NAME FILE FIRST LIMIT SPEEDS'",
        help="replay so many requests of a trace, from the FIRST on, at each speed (repeatable): "
        "'conv azure2023_conv.csv 10585 300 1,2'",
    )
    made.add_argument("--prompt-tokens", type=int, default=1 << 20, help="clips those of the trace")
    made.add_argument("--output-tokens", type=int, default=1 << 20, help="clips those of the trace")
    made.add_argument(
        "--slo",
        dest="slos",
        action="append",
        type=slo_of,
        metavar="TTFT/TPOT[/GAP]",
        help="in milliseconds, for goodput (repeatable; default 200/20, 200/20/50, 500/50)",
    )
    made.add_argument(
        "--during",
        dest="laters",
        action="append",
        default=[],
        type=later_of,
        metavar="'SECONDS[@REPLAY] ARGUMENT ...'",
        help="run `baton ARGUMENT ...` so many seconds into each replay, or into one (repeatable): "
        "'8@2 scale --decode 2'; @prefill and @decode stand for the first ready worker of the "
        "role: '8 role @prefill decode'",
    )
    made.add_argument(
        "--split",
        dest="splits",
        action="append",
        type=split_of,
        metavar="PREFILL+DECODE",
        help="replay everything with so many workers in either role (repeatable); they take it "
        "live, in the order given",
    )
    made.add_argument("--theme", default="", help="write a page under benchmarks/results")
    made.add_argument("--hardware", default="")
    made.add_argument("--commit", default="", help="where this is no git checkout")
    made.add_argument("--note", default="")
    return made
