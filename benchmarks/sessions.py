"""Replay sessions that return: `python -m benchmarks.sessions --help`.

Either agents that are made up, each of whose prompts is all that came before, answers included, and
the result of a tool; or the requests of a trace with shared prefixes in Mooncake's form, at their
arrival times. Reports the time to first token, goodput, and how much of the prompts was not
computed, by the tier that had it. `cluster.bench.measure` has the definitions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import report
from benchmarks.conversations import completion_body, read_completion
from cluster.bench import facts
from cluster.bench.http_stream import HttpClientConnection
from cluster.bench.measure import Result, Run, Slo, read_answer, summarise
from cluster.bench.options import add_seed
from cluster.bench.runs import first_model
from cluster.bench.workload import Ask, random_ids, spread_ticks

#: Tokens that one of the trace's `hash_ids` names.
_BLOCK_OF_TRACE = 512
_WARM_UPS, _WARM_TOKENS = 12, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """`pause_s` after the answer before it, these tokens follow all that came before."""

    pause_s: float = 0.0
    new: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Begins `at` seconds after the start."""

    at: float
    turns: tuple[Turn, ...]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.sessions", description="Replay sessions that return."
    )
    made.add_argument("--url", default="http://127.0.0.1:8000")
    made.add_argument("--model", default="", help="default: the first that is served")
    made.add_argument("--trace", type=Path, help="Mooncake's form; default: agents")
    made.add_argument("--agents", type=int, default=16, help="how many, without a trace")
    made.add_argument("--every", type=int, default=1, help="one of so many sessions of the trace")
    made.add_argument(
        "--block-tokens", type=int, default=512,
        help="tokens that stand for 512 of the trace: prompts are scaled, what they share is not",
    )  # fmt: skip
    made.add_argument("--output-scale", type=float, default=1.0, help="of the trace")
    made.add_argument("--speed", type=float, default=1.0, help="arrivals so many times as fast")
    made.add_argument("--slo-ttft", type=float, default=1.0, help="seconds, for goodput")
    made.add_argument("--slo-tpot", type=float, default=0.1, help="seconds, for goodput")
    made.add_argument("--vocab-size", type=int, default=49152)
    add_seed(made)
    report.add_options(made.add_argument_group("report"))
    return made


def sessions_of(options: argparse.Namespace) -> list[Session]:
    """What the options ask for, in the order of arrival."""
    made = read_sessions(options) if options.trace else agents(options)
    return [replace(session, at=session.at / options.speed) for session in made]


def agents(options: argparse.Namespace) -> list[Session]:
    """Agents that work on tasks under a common system prompt: 5 to 12 turns, each a call of a tool
    and its result."""
    rng = random.Random(f"{options.seed}/agents")
    system = random_ids(rng, 256, options.vocab_size)
    made = []
    for _ in range(options.agents):
        turns = []
        for number in range(rng.randint(5, 12)):
            count = rng.randint(16, 128) if number else rng.randint(128, 512)
            turns.append(
                Turn(
                    pause_s=rng.expovariate(1 / 6) if number else 0.0,
                    new=(*(system if not number else ()), *_ids(rng, options, count)),
                    output_tokens=rng.randint(8, 32),
                )
            )
        made.append(Session(at=rng.uniform(0, 60), turns=tuple(turns)))
    return sorted(made, key=lambda session: session.at)


def _ids(rng: random.Random, options: argparse.Namespace, count: int) -> list[int]:
    return random_ids(rng, count, options.vocab_size)


def read_sessions(options: argparse.Namespace) -> list[Session]:
    """Requests of a trace, each a session of one turn. Requests that share their first two blocks
    belong together; one of `every` such groups is taken, so that these share what they shared."""
    groups: dict[tuple[int, ...], int] = {}
    chosen = []
    with options.trace.open() as file:
        for row in map(json.loads, file):
            group = groups.setdefault(tuple(row["hash_ids"][:2]), len(groups))
            if group % options.every == 0:
                chosen.append(row)
    ends = [row["timestamp"] / 1000 for row in chosen]
    asks = spread_ticks([Ask(at=at, prompt_tokens=1, output_tokens=1) for at in ends])
    made = []
    for row, ask in zip(chosen, asks, strict=True):
        ids: list[int] = []
        for name in row["hash_ids"]:
            rng = random.Random(f"{options.seed}/{name}")
            ids += _ids(rng, options, options.block_tokens)
        length = round(row["input_length"] * options.block_tokens / _BLOCK_OF_TRACE)
        turn = Turn(
            new=tuple(ids[: max(1, length)]),
            output_tokens=max(2, round(row["output_length"] * options.output_scale)),
        )
        made.append(Session(at=ask.at - asks[0].at, turns=(turn,)))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request: tokens of its prompt that were not computed, those of them that each tier below
    the pool brought, and the seconds that this took."""

    result: Result
    num_cached: int
    loaded: Counter[str]
    load_s: float


async def run(options: argparse.Namespace, sessions: Sequence[Session]) -> list[Answered]:
    """Warm up, then replay all sessions."""
    if not options.model:
        options.model = await first_model(options.url)
    rng = random.Random("warm up")
    for _ in range(_WARM_UPS):
        turn = Turn(new=tuple(_ids(rng, options, _WARM_TOKENS)), output_tokens=2)
        await _follow(options, Session(at=0.0, turns=(turn,)), time.perf_counter())
    start = time.perf_counter()
    parts = await asyncio.gather(*(_follow(options, session, start) for session in sessions))
    return [answered for part in parts for answered in part]


async def _follow(options: argparse.Namespace, session: Session, start: float) -> list[Answered]:
    await asyncio.sleep(session.at - (time.perf_counter() - start))
    connection = HttpClientConnection(options.url)
    history: list[int] = []
    answered = []
    for turn in session.turns:
        await asyncio.sleep(turn.pause_s)
        history += turn.new
        body = completion_body(options, history, turn.output_tokens) | {"timeline": True}
        answer = await connection.post("/v1/completions", body, timeout_s=600)
        result = read_answer(answer, expected_tokens=turn.output_tokens)
        output, usage = read_completion(answer)
        history += output
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        loaded: Counter[str] = Counter()
        load_s = 0.0
        for span in (result.timeline or {}).get("spans", ()):
            if span["phase"] == "kv_load":
                loaded.update(span.get("counts") or {})
                load_s += span["end"] - span["start"]
        answered.append(
            Answered(result=result, num_cached=int(cached or 0), loaded=loaded, load_s=load_s)
        )
    connection.close()
    return answered


def shares(answered: Sequence[Answered]) -> dict[str, float]:
    """Of all prompt tokens: those that were not computed, and those from each tier below the pool.
    Of all times to the first token: what was spent on that."""
    total = max(1, sum(one.result.prompt_tokens for one in answered))
    loaded = sum((one.loaded for one in answered), Counter())
    cached = sum(one.num_cached for one in answered)
    ttft_s = sum(one.result.ttft for one in answered if not one.result.error)
    return {
        "cached": cached / total,
        **{name: n / total for name, n in sorted(loaded.items())},
        "load time": sum(one.load_s for one in answered) / max(ttft_s, 1e-9),
    }


def run_of(options: argparse.Namespace, answered: Sequence[Answered]) -> Run:
    """The line of a report."""
    slo = Slo(ttft=options.slo_ttft, tpot=options.slo_tpot)
    results = [one.result for one in answered]
    label = ", ".join(f"{name} {share:.1%}" for name, share in shares(answered).items())
    return Run(
        label=label,
        prompt_tokens=round(sum(r.prompt_tokens for r in results) / len(results)),
        output_tokens=round(sum(r.output_tokens for r in results) / len(results)),
        concurrency=None,
        repeats=(summarise(results, slo),),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a request failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    sessions = sessions_of(options)
    one = run_of(options, asyncio.run(run(options, sessions)))
    facts.say(facts.overview(one.label, one.repeats))
    report.write_if_asked(
        options,
        command=f"python -m benchmarks.sessions {shlex.join(arguments)}",
        workload=f"{len(sessions)} sessions of {options.trace.name if options.trace else 'agents'}",
        runs=[one],
    )
    return int(bool(one.repeats[0].failures))


if __name__ == "__main__":
    sys.exit(main())
