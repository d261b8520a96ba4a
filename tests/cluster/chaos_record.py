"""What a run of tests.cluster.chaos saw, and its record; several runs add up to one."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from tests.support.chaos_load import page, table, usage_table

PAUSE_S = 0.2
#: A line by which a router tells that an accepted request has lost its worker.
_RESUMED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) WARNING .* request resumed .*")
_NAME = re.compile(r" request_name=(\S+)")


@dataclass
class Outcome:
    """The result of a run."""

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    #: Errors of requests whose router has died.
    lost_with_router: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    #: Of each stream that a router resumed: from the router's knowledge of the loss to its next
    #: token.
    resumed_s: list[float] = field(default_factory=list)
    #: The longest pause of any stream in the 30 s after a death of each kind.
    pauses_s: dict[str, list[float]] = field(default_factory=dict)
    #: What happened when, in seconds since the start: deaths, and pauses of more than two seconds.
    story: list[str] = field(default_factory=list)
    usage: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not (self.wrong or self.failed or self.left)

    def note_pauses(
        self, streams: Iterable[Sequence[float]], deaths: Iterable[tuple[float, str]], start: float
    ) -> None:
        """`streams`: the times of each one's tokens, like `start` since the epoch."""
        pauses = {
            (begin, end)
            for times in streams
            for begin, end in pairwise(times)
            if end - begin > PAUSE_S
        }
        for when, kind in deaths:
            found = [end - begin for begin, end in pauses if begin - 1 <= when + 30 and end >= when]
            self.pauses_s.setdefault(kind, []).append(max(found, default=0.0))
        long = {(round(b, 1), round(e, 1)) for b, e in pauses if e - b > 2.0}
        events = [*deaths, *((b, f"pause of {e - b:.1f} s") for b, e in long)]
        self.story = [f"{when - start:.1f} {what}" for when, what in sorted(events)]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), indent=1) + "\n")


def total(paths: Iterable[Path]) -> Outcome:
    """The sum of saved runs; processes are named by their run."""
    whole = Outcome()
    for number, path in enumerate(paths, start=1):
        run = Outcome(**json.loads(path.read_text()))
        whole.seconds += run.seconds
        whole.requests += run.requests
        whole.tokens += run.tokens
        whole.deaths.update(run.deaths)
        whole.lost_with_router.update(run.lost_with_router)
        for name in ("wrong", "failed", "left", "resumed_s"):
            getattr(whole, name).extend(getattr(run, name))
        for kind, pauses in run.pauses_s.items():
            whole.pauses_s.setdefault(kind, []).extend(pauses)
        whole.usage |= {f"run {number}: {name}": looks for name, looks in run.usage.items()}
    return whole


def resumptions(logs: Path, arrivals: Mapping[str, Sequence[float]]) -> list[float]:
    """Seconds from each loss that a log below `logs` tells to the stream's next token; losses
    without a token between them count once. `arrivals`: times of a stream's tokens."""
    losses: dict[tuple[str, float], float] = {}  # the first before a token
    for path in logs.rglob("*"):
        if not path.is_file():
            continue
        for line in path.read_text(errors="replace").splitlines():
            found, name = _RESUMED.search(line), _NAME.search(line)
            if found is None or name is None:
                continue
            at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            times = arrivals.get(name[1], ())
            if (place := bisect_right(times, at)) < len(times):
                token = name[1], times[place]
                losses[token] = min(losses.get(token, at), at)
    return sorted(token - at for (_, token), at in losses.items())


def at(share: float, values: Sequence[float]) -> float:
    """A percentile, as one of the values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def record(outcome: Outcome, command: str, *, intro: str) -> str:
    """The record of a run."""
    resumed = outcome.resumed_s
    figures = table(
        ["what", "value"],
        [
            ["seconds", f"{outcome.seconds:.0f}"],
            ["deaths", outcome.deaths.total()],
            ["requests completed", f"{outcome.requests} ({outcome.tokens} tokens)"],
            ["outputs that differ from the undisturbed run", len(outcome.wrong)],
            ["requests that failed while their router lived", len(outcome.failed)],
            ["requests that ended with their router", outcome.lost_with_router.total()],
            ["left at the end (requests, blocks held or quarantined)", outcome.left or "nothing"],
            ["streams resumed on other workers", len(resumed)],
            [
                "from the detected loss to the first resumed token: p50, p99, longest",
                " ".join(f"{at(share, resumed):.2f} s" for share in (0.5, 0.99, 1.0)),
            ],
        ],
    )
    deaths = table(
        ["death", "times", "pause of a stream until 30 s later: median of the longest", "longest"],
        [
            [kind, count, f"{at(0.5, pauses):.1f} s", f"{max(pauses):.1f} s"]
            for kind, count in sorted(outcome.deaths.items())
            for pauses in [outcome.pauses_s[kind]]
        ],
    )
    return page(intro, [figures, deaths, usage_table(_oldest(outcome.usage))], command)


def _oldest(usage: Mapping[str, list[dict[str, float]]]) -> dict[str, list[dict[str, float]]]:
    """Of each kind of process the one that lived longest."""
    kinds: dict[str, list[str]] = {}
    for name in usage:
        kinds.setdefault(name.split()[-2], []).append(name)
    return {
        f"{kind}: the oldest of {len(names)}": usage[max(names, key=lambda each: len(usage[each]))]
        for kind, names in kinds.items()
    }
