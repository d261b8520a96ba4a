"""What runs with faults have in common: their model, their requests, and the record of a run."""

from __future__ import annotations

import platform
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench import facts
from protocol.wire import inference_pb2 as wire
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import write_model_text

VOCAB = 512


def chaos_model(folder: Path, **overrides: Any) -> str:
    """A tiny model with the text half that a router needs."""
    save_tiny_llama(folder, vocab_size=VOCAB, **overrides)
    config = (folder / "config.json").read_text()
    write_model_text(folder)
    (folder / "config.json").write_text(config)
    return str(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request of the load."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def message(self) -> wire.GenerateRequest:
        return wire.GenerateRequest(
            prompt_token_ids=wire.TokenIds(ids=self.prompt),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=True,
        )


def make_load(
    rng: random.Random, *, count: int, prompts: Sequence[int], outputs: Sequence[int]
) -> list[LoadRequest]:
    """Requests with lengths drawn from `prompts` and `outputs`; a third share a beginning, half
    are greedy and half have a seed."""
    stem = [rng.randrange(3, VOCAB) for _ in range(max(prompts) // 2)]
    load = []
    for number in range(count):
        length = rng.choice(prompts)
        shared = stem[:length] if number % 3 == 0 else []
        rest = [rng.randrange(3, VOCAB) for _ in range(length - len(shared))]
        load.append(
            LoadRequest(
                prompt=(*shared, *rest),
                max_tokens=rng.choice(outputs),
                temperature=0.9 if number % 2 else 0.0,
                seed=number,
            )
        )
    return load


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def usage_table(noted: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """The resources of processes, from the first look to the last."""
    names = list(next(iter(next(iter(noted.values()), ())), {}))
    return table(
        ["process", *(name.replace("_", " ") for name in names)],
        [
            [process, *(" ".join(str(round(look[name])) for look in looks) for name in names)]
            for process, looks in noted.items()
        ],
    )


def page(text: str, tables: Iterable[str], command: str) -> str:
    """The record of a run: its heading and text, its tables, and where it ran."""
    where = (
        f"- machine: {facts.machine()}, Python {platform.python_version()}\n"
        f"- commit: {facts.commit()}\n"
        f"- command: `{command}`\n"
    )
    return "\n".join([text, *tables, where])
