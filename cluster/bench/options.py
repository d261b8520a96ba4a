"""Options of `baton bench`. Without heavy imports, so that `baton --help` answers at once."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_load(group: Any) -> None:
    """What is sent, and when."""
    number = group.add_argument
    number(
        "--concurrency",
        type=_numbers,
        metavar="N,N,...",
        help="closed loop: so many clients in each run (default: 1,4,16)",
    )
    number(
        "--rate",
        type=_positive,
        metavar="R",
        help="open loop: requests a second, Poisson or at the pattern of --trace",
    )
    number(
        "--cv",
        type=_positive,
        metavar="CV",
        help="coefficient of variation of the gaps between drawn arrivals (Gamma; Poisson: 1)",
    )
    number(
        "--trace",
        type=Path,
        metavar="FILE",
        help="open loop: arrivals and lengths of a file: Azure 2023 CSV, ServeGen CSV or "
        "Mooncake JSON lines",
    )
    number("--window", type=_window, metavar="START:END", help="seconds of the trace to replay")
    count, some = _at_least(0), _at_least(1)
    number("--first", type=count, default=0, metavar="N", help="first request of the trace to send")
    number(
        "--limit", type=some, default=200, metavar="N", help="requests of a trace (default: 200)"
    )
    number("--speed", type=_positive, default=1.0, metavar="X", help="replay a trace faster")
    number("--spread-ticks", action="store_true", help="for traces with coarse clocks")
    number("--input-scale", type=_positive, default=1.0, metavar="X", help="of prompts")
    number("--output-scale", type=_positive, default=1.0, metavar="X", help="of outputs")
    number("--prompt-tokens", type=some, default=128, help="clips those of a trace (default: 128)")
    number("--output-tokens", type=some, default=64, help="clips those of a trace (default: 64)")
    number("--requests", type=some, default=0, help="requests of a run (default: 4 a client; 200)")
    number(
        "--warmup",
        type=count,
        default=2,
        help="requests before a run, not counted (default: 2, for each client of a closed loop)",
    )
    number("--repeats", type=some, default=3, help="runs of each closed loop (default: 3)")
    _add_search(number)


def _add_search(number: Any) -> None:
    number(
        "--find-rate",
        type=_share,
        nargs="?",
        const=0.9,
        metavar="SHARE",
        help="search the highest rate at which this share of the requests keeps every --slo "
        "(default: 0.9); --rate is where it starts",
    )
    number(
        "--min-seconds",
        type=_positive,
        default=10.0,
        metavar="S",
        help="arrivals at each rate of a search last so long; it ends where the requests that "
        "--requests or --limit allow do not (default: 10)",
    )


def add_requests(group: Any) -> None:
    """How requests are put."""
    group.add_argument("--model", default="", help="default: the first that is served")
    group.add_argument("--api", choices=("completions", "chat"), default="completions")
    group.add_argument("--text", action="store_true", help="words instead of token ids")
    group.add_argument("--vocab-size", type=_at_least(1), default=49152, help="of random token ids")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--respect-eos", action="store_true", help="let the model end early")
    group.add_argument("--timeout", type=_positive, default=600.0, help="seconds for one request")
    add_seed(group)


def add_seed(group: Any) -> None:
    """What prompts are made from: without it no run meets those of an earlier one in a cache."""
    drawn = random.randrange(1 << 32)
    group.add_argument("--seed", type=int, default=drawn, help="of prompts; default: drawn")


def add_results(group: Any) -> None:
    """What is counted and written down."""
    for name, what in (
        ("ttft", "to the first token"),
        ("tpot", "a token after the first, on average"),
        ("gap", "between any two tokens"),
        ("e2e", "to the last token"),
    ):
        group.add_argument(
            f"--slo-{name}", type=_positive, metavar="S", help=f"for goodput: seconds {what}"
        )
    group.add_argument(
        "--gpus", type=_at_least(0), default=0, help="of the server: adds goodput per GPU"
    )
    group.add_argument(
        "--output",
        type=Path,
        metavar="NAME",
        help="write NAME.json and NAME.html (and NAME.png where matplotlib is installed)",
    )


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("clients are counted from 1")
    return numbers


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}: {text}")
        return value

    return number


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be positive: {text}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share between 0 and 1: {text}")
    return value


def _window(text: str) -> tuple[float, float]:
    start, colon, end = text.partition(":")
    window = float(start or 0), float(end or "inf")
    if not colon or not 0 <= window[0] < window[1]:
        raise argparse.ArgumentTypeError(f"must be START:END in seconds: {text}")
    return window
