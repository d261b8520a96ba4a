"""What runs with faults have in common: their model, their requests, and the record of a run."""

from __future__ import annotations

import platform
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cluster.bench import facts
from engine.kernels.sampling import gumbel_noise, noise_key
from protocol.wire import inference_pb2 as wire
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import write_model_text

VOCAB = 512
#: Between the best scores of a token: several times what float32 differs from float64 there.
MARGIN = 3e-4


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


def decided(
    model: str, outputs: Mapping[LoadRequest, Sequence[int]]
) -> dict[LoadRequest, Sequence[int]]:
    """The outputs whose tokens all lead by more than MARGIN; at least half of them do.

    Float32 sums differ in their last bits with the sizes of batches and chunks, so a token that
    leads by less may change. AssertionError for an output that the model, run by transformers in
    float64, would not give.
    """
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager"
    )
    leads = {sent: _least_lead(whole, sent, ids) for sent, ids in outputs.items()}
    assert min(leads.values()) > -MARGIN, [sent for sent in leads if leads[sent] <= -MARGIN]
    found = {sent: ids for sent, ids in outputs.items() if leads[sent] > MARGIN}
    assert 2 * len(found) >= len(outputs)
    return found


def _least_lead(model: Any, sent: LoadRequest, ids: Sequence[int]) -> float:
    """By how much the score of an output's token exceeds all others, where it does so least."""
    first, tokens = len(sent.prompt), torch.tensor([*sent.prompt, *ids])
    with torch.inference_mode():
        scores = model(tokens[None, :-1]).logits[0, first - 1 :]
    if sent.temperature:
        keys = torch.tensor([noise_key(sent.seed, place) for place in range(first, len(tokens))])
        noise = gumbel_noise(keys, torch.arange(scores.shape[1], dtype=torch.int32))
        scores = scores / sent.temperature + noise
    given = scores.gather(1, tokens[first:, None])
    others = scores.scatter(1, tokens[first:, None], -torch.inf).amax(dim=1)
    return float((given[:, 0] - others).min())


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
