"""Requests to send: prompts of a given length, and arrival traces read from files."""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

_WORDS = (
    "time year people way day thing life child world school state family group country problem "
    "hand part place case week company system question work number night point home water room "
    "money"
)

# Ids below this are special tokens in the vocabularies seen so far.
_FIRST_PLAIN_TOKEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: `at` seconds after the start, tokens in and out."""

    at: float = 0.0
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a request is put: `completions` with token ids or text, or `chat` with text.

    Random token ids lie in [256, vocab_size); equal (seed, number) give equal prompts.
    """

    api: str = "completions"
    text: bool = False
    model: str = ""
    vocab_size: int = 49152
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    timeline: bool = False

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"

    def body(self, ask: Ask, number: int) -> dict[str, Any]:
        """The JSON body of request `number`."""
        source = random.Random(f"{self.seed}/{number}")
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.timeline:
            body["timeline"] = True
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": _text(source, ask.prompt_tokens)}]
        elif self.text:
            body["prompt"] = _text(source, ask.prompt_tokens)
        else:
            body["prompt"] = random_ids(source, ask.prompt_tokens, self.vocab_size)
        return body


def random_ids(source: random.Random, count: int, vocab_size: int) -> list[int]:
    return source.choices(range(_FIRST_PLAIN_TOKEN, vocab_size), k=count)


def _text(source: random.Random, num_words: int) -> str:
    """Common words: about one token each, so the length in tokens is near `num_words`."""
    return " ".join(source.choices(_WORDS.split(), k=max(1, num_words)))


def read_trace(path: Path) -> list[Ask]:
    """The requests of a trace, times from 0. The known forms are told apart by their fields.

    - Azure 2023: CSV with TIMESTAMP, ContextTokens, GeneratedTokens
    - ServeGen samples: CSV with t_s, input_tokens, output_tokens
    - Mooncake: JSON lines with timestamp (ms), input_length, output_length
    """
    with path.open(newline="") as file:
        rows = map(json.loads, file) if path.suffix == ".jsonl" else csv.DictReader(file)
        asks = [_ask_of(row) for row in rows]
    if not asks:
        raise ValueError("holds no request")
    start = min(ask.at for ask in asks)
    return [replace(ask, at=ask.at - start) for ask in sorted(asks, key=lambda ask: ask.at)]


def _ask_of(row: dict[str, Any]) -> Ask:
    if "ContextTokens" in row:
        # Seven digits of a second; Python reads six.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        return _ask(at, row["ContextTokens"], row["GeneratedTokens"])
    if "t_s" in row:
        return _ask(float(row["t_s"]), row["input_tokens"], row["output_tokens"])
    if "input_length" in row:
        return _ask(row["timestamp"] / 1000, row["input_length"], row["output_length"])
    raise ValueError(f"unknown trace with the fields {sorted(row)}")


def _ask(at: float, prompt_tokens: Any, output_tokens: Any) -> Ask:
    return Ask(at=at, prompt_tokens=int(prompt_tokens), output_tokens=max(1, int(output_tokens)))


def spread_ticks(asks: Sequence[Ask]) -> list[Ask]:
    """Requests that share a tick, spread evenly until the next tick (coarse clocks make bursts)."""
    ticks = sorted({ask.at for ask in asks})
    following = dict(itertools.pairwise(ticks))
    return sorted(_spread(asks, following), key=lambda ask: ask.at)


def _spread(asks: Sequence[Ask], following: dict[float, float]) -> Iterator[Ask]:
    groups: dict[float, list[Ask]] = {}
    for ask in asks:
        groups.setdefault(ask.at, []).append(ask)
    for tick, group in groups.items():
        width = following.get(tick, tick) - tick
        for place, ask in enumerate(group):
            yield replace(ask, at=tick + width * place / len(group))


def cut_window(asks: Sequence[Ask], start_s: float, end_s: float) -> list[Ask]:
    """The requests that arrive in a window of a trace, times from its start. Raises ValueError when
    there are none."""
    chosen = [replace(ask, at=ask.at - start_s) for ask in asks if start_s <= ask.at < end_s]
    if not chosen:
        raise ValueError(f"no request arrives from {start_s:g} to {end_s:g} s")
    return chosen


def scale_lengths(asks: Sequence[Ask], inputs: float, outputs: float) -> list[Ask]:
    """Prompts and outputs so many times as long, one token at least."""
    return [
        replace(
            ask,
            prompt_tokens=max(1, round(ask.prompt_tokens * inputs)),
            output_tokens=max(1, round(ask.output_tokens * outputs)),
        )
        for ask in asks
    ]


def mean_rate(asks: Sequence[Ask]) -> float:
    """Requests per second; 0 where all come at once."""
    length_s = asks[-1].at - asks[0].at if asks else 0.0
    return (len(asks) - 1) / length_s if length_s > 0 else 0.0


def at_rate(asks: Sequence[Ask], rate: float) -> list[Ask]:
    """The same pattern of arrivals, stretched or squeezed to a mean rate."""
    factor = mean_rate(asks) / rate
    return [replace(ask, at=(ask.at - asks[0].at) * factor) for ask in asks]


def drawn_arrivals(asks: Sequence[Ask], rate: float, *, cv: float, seed: int) -> list[Ask]:
    """The same requests at times of a renewal process: gaps are Gamma distributed with the mean
    1 / rate and the coefficient of variation `cv`. 1 is a Poisson process, more comes in bursts."""
    source, at, drawn = random.Random(f"arrivals/{seed}"), 0.0, []
    shape = 1 / (cv * cv)
    for ask in asks:
        drawn.append(replace(ask, at=at))
        at += source.gammavariate(shape, 1 / (rate * shape))
    return drawn


def fit_trace(
    asks: Sequence[Ask], *, limit: int, speed: float, max_prompt: int, max_output: int
) -> list[Ask]:
    """The first `limit` requests, `speed` times as fast, lengths clipped; times from 0."""
    return [
        Ask(
            at=(ask.at - asks[0].at) / speed,
            prompt_tokens=max(1, min(ask.prompt_tokens, max_prompt)),
            output_tokens=min(ask.output_tokens, max_output),
        )
        for ask in asks[:limit]
    ]
