"""What structured output costs a worker: `python -m benchmarks.masks MODEL_FOLDER`.

Every sequence samples at random among what its mask allows, from a seed of its own, so that they
are at different places of the grammar; one that ends begins anew. A step is what a worker does
between two steps of its engine: take each sequence's token, compute all masks.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from cluster.bench.measure import percentile
from grammar.compiler import Compiler
from grammar.matcher import Matcher, compute_masks
from grammar.vocabulary import load_vocabulary
from protocol.sampling import Grammar, GrammarKind

STEPS = 200
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA)),
    "any object": Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type": "object"}'),
    "regex": Grammar(
        kind=GrammarKind.REGEX, source=r"(\d{1,3}\.){3}\d{1,3}(, (\d{1,3}\.){3}\d{1,3})*"
    ),
}


def pick(matcher: Matcher, draw: random.Random) -> int:
    """A random allowed token."""
    assert matcher.mask is not None
    bits = np.unpackbits(np.frombuffer(matcher.mask, np.uint8), bitorder="little")
    return int(draw.choice(np.flatnonzero(bits)))


def steps_ms(compiler: Compiler, grammar: Grammar, sequences: int, end: int) -> list[float]:
    """The times of STEPS steps of so many sequences."""
    draws = [random.Random(seed) for seed in range(sequences)]
    matchers = [compiler.start(grammar, ends=(end,)) for _ in draws]
    times = []
    for _ in range(STEPS):
        tokens = [pick(m, draw) for m, draw in zip(matchers, draws, strict=True)]
        for at in [at for at, token in enumerate(tokens) if token == end]:
            matchers[at] = compiler.start(grammar, ends=(end,))
            tokens[at] = pick(matchers[at], draws[at])
        start = time.perf_counter()
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.take([token])
        compute_masks(matchers)
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)


def measure(folder: Path, vocab_size: int, threads: int, counts: list[int]) -> dict[str, Any]:
    start = time.perf_counter()
    vocabulary = load_vocabulary(folder, vocab_size)
    loaded = time.perf_counter()
    if vocabulary is None:
        raise SystemExit(f"{folder} has no tokenizer.json")
    figures: dict[str, Any] = {"vocabulary_s": round(loaded - start, 3), "grammars": {}}
    for name, grammar in GRAMMARS.items():
        compiler = Compiler(vocabulary, threads=threads)
        start = time.perf_counter()
        compiler.start(grammar)
        first = 1e3 * (time.perf_counter() - start)
        rows = {}
        for count in counts:
            times = steps_ms(compiler, grammar, count, vocabulary.eos_token)
            rows[count] = {f"p{p}_ms": round(percentile(times, p), 3) for p in (50, 99)}
        figures["grammars"][name] = {"first_ms": round(first, 3), "step": rows}
    return figures


def main() -> None:
    """Measure, print, and with --theme keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--theme", default="")
    options = parser.parse_args()
    config = json.loads((options.folder / "config.json").read_text())
    result = {
        "model": options.folder.name,
        "vocab_size": config["vocab_size"],
        "threads": options.threads,
        "steps": STEPS,
        **measure(options.folder, config["vocab_size"], options.threads, options.sequences),
    }
    print(json.dumps(result, indent=1))
    if options.theme:
        print(report.write_figures("grammar", options.theme, result))


if __name__ == "__main__":
    main()
