"""Measure conversations: `python -m benchmarks.conversations --help`.

Concurrent clients hold conversations under one system prompt; each turn sends the whole history and
new tokens. Reports for each turn the time to first token and the cached share of the prompt. Works
with any server that has OpenAI's completions API, accepts token ids and returns them
(`return_token_ids`); compare with a server without a prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, product
from statistics import mean

from benchmarks import report
from cluster.bench import facts
from cluster.bench.http_stream import Answer, HttpClientConnection
from cluster.bench.measure import Result, Run, read_answer, summarise
from cluster.bench.options import add_seed
from cluster.bench.runs import first_model
from cluster.bench.workload import random_ids


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.conversations", description="Measure conversations."
    )
    made.add_argument("--url", default="http://127.0.0.1:8000")
    made.add_argument("--model", default="", help="default: the first that is served")
    made.add_argument("--clients", type=int, default=4)
    made.add_argument("--conversations", type=int, default=2, help="of each client, in a run")
    made.add_argument("--turns", type=int, default=4)
    made.add_argument(
        "--interleave", action="store_true",
        help="each client takes its conversations in turn: all of them stay live, and a pool that "
        "does not hold them gets them back from its KV tiers or computes them again",
    )  # fmt: skip
    made.add_argument("--system-tokens", type=int, default=128)
    made.add_argument("--user-tokens", type=int, default=64)
    made.add_argument("--output-tokens", type=int, default=32)
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument(
        "--beside", type=int, default=0,
        help="short prompts with long outputs, so many at any time, whose gaps are a line of their "
        "own",
    )  # fmt: skip
    made.add_argument("--vocab-size", type=int, default=49152)
    add_seed(made)
    report.add_options(made.add_argument_group("report"))
    return made


#: Of the streams beside the conversations.
_BESIDE_PROMPT, _BESIDE_OUTPUT = 16, 128


@dataclass
class Turns:
    """Measurements by number of the turn. `outputs`: by client, conversation and turn."""

    outputs: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    beside: list[Result] = field(default_factory=list)
    results: dict[int, list[Result]] = field(default_factory=dict)
    cached: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)

    def add(self, turn: int, result: Result, usage: dict[str, object]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.results.setdefault(turn, []).append(result)
        self.prompts.setdefault(turn, []).append(result.prompt_tokens)
        if isinstance(details, dict):
            self.cached.setdefault(turn, []).append(int(details.get("cached_tokens") or 0))


async def run(options: argparse.Namespace) -> list[Turns]:
    """All repeats, each with conversations of its own under a system prompt of its own."""
    if not options.model:
        options.model = await first_model(options.url)
    repeats = []
    for repeat in range(-1, options.repeats):  # the first only warms up
        turns = Turns()
        system = _ids(options, f"system/{repeat}", options.system_tokens)
        clients = (_client(options, repeat, i, system, turns) for i in range(options.clients))
        over = asyncio.Event()
        streams = [
            asyncio.create_task(_beside(options, f"{repeat}/{i}", over, turns))
            for i in range(options.beside)
        ]
        await asyncio.gather(*clients)
        over.set()
        await asyncio.gather(*streams)
        if repeat >= 0:
            repeats.append(turns)
    return repeats


async def _client(
    options: argparse.Namespace, repeat: int, number: int, system: list[int], turns: Turns
) -> None:
    connection = HttpClientConnection(options.url)
    histories = [list(system) for _ in range(1 if repeat < 0 else options.conversations)]
    for conversation, turn in order(len(histories), options.turns, options.interleave):
        history = histories[conversation]
        name = f"{repeat}/{number}/{conversation}/{turn}"
        history += _ids(options, name, options.user_tokens)
        body = completion_body(options, history, options.output_tokens)
        answer = await connection.post("/v1/completions", body, timeout_s=600)
        result = read_answer(answer, expected_tokens=options.output_tokens)
        output, usage = read_completion(answer)
        turns.add(turn, result, usage)
        turns.outputs[number, conversation, turn] = output
        history += output
    connection.close()


async def _beside(
    options: argparse.Namespace, name: str, over: asyncio.Event, turns: Turns
) -> None:
    """One stream after the other until the conversations are over."""
    connection = HttpClientConnection(options.url)
    for number in count():
        prompt = _ids(options, f"beside/{name}/{number}", _BESIDE_PROMPT)
        body = completion_body(options, prompt, _BESIDE_OUTPUT)
        answer = await connection.post("/v1/completions", body, timeout_s=600)
        if over.is_set():
            break
        turns.beside.append(read_answer(answer, expected_tokens=_BESIDE_OUTPUT))
    connection.close()


def order(conversations: int, turns: int, interleave: bool) -> list[tuple[int, int]]:
    """(conversation, turn) of a client's requests: one conversation after the other, or all by
    turns."""
    pairs = list(product(range(conversations), range(turns)))
    return sorted(pairs, key=lambda pair: pair[1]) if interleave else pairs


def _ids(options: argparse.Namespace, name: str, count: int) -> list[int]:
    return random_ids(random.Random(f"{options.seed}/{name}"), count, options.vocab_size)


def completion_body(
    options: argparse.Namespace, prompt: list[int], max_tokens: int
) -> dict[str, object]:
    """A streamed completion of token ids, greedy, of `max_tokens` tokens."""
    return {
        "model": options.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def read_completion(answer: Answer) -> tuple[list[int], dict[str, object]]:
    """The output ids and the usage of a streamed answer."""
    ids: list[int] = []
    usage: dict[str, object] = {}
    for _, data in answer.events():
        if data != "[DONE]":
            event = json.loads(data)
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                ids += choice.get("token_ids") or ()
    return ids, usage


def runs_of(options: argparse.Namespace, repeats: Sequence[Turns]) -> list[Run]:
    """A line for each turn, with the share of its prompt tokens that was cached."""
    made = []
    for turn in range(options.turns):
        cached = sum(sum(turns.cached.get(turn, ())) for turns in repeats)
        prompt = sum(sum(turns.prompts[turn]) for turns in repeats)
        length = mean(n for turns in repeats for n in turns.prompts[turn])
        made.append(
            Run(
                label=f"turn {turn + 1}: {cached / max(1, prompt):.0%} cached",
                prompt_tokens=round(length),
                output_tokens=options.output_tokens,
                concurrency=options.clients,
                repeats=tuple(summarise(turns.results[turn]) for turns in repeats),
            )
        )
    if options.beside and all(turns.beside for turns in repeats):
        made.append(
            Run(
                label="streams beside",
                prompt_tokens=_BESIDE_PROMPT,
                output_tokens=_BESIDE_OUTPUT,
                concurrency=options.beside,
                repeats=tuple(summarise(turns.beside) for turns in repeats),
            )
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a request failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    runs = runs_of(options, asyncio.run(run(options)))
    for one in runs:
        facts.say(facts.overview(one.label, one.repeats))
    report.write_if_asked(
        options,
        command=f"python -m benchmarks.conversations {shlex.join(arguments)}",
        workload=f"{options.clients} clients, each {options.conversations} conversations of "
        f"{options.turns} turns in a repeat{', taken in turn' * options.interleave}, streamed "
        f"completions of token ids, greedy; "
        f"{options.system_tokens} tokens that all begin with, {options.user_tokens} new ones a "
        f"turn; {options.repeats} repeats after a warm-up; seed {options.seed}",
        runs=runs,
    )
    return int(any(summary.failures for one in runs for summary in one.repeats))


if __name__ == "__main__":
    sys.exit(main())
