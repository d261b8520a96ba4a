"""Decode, prefill and long contexts of several families on one GPU, each row with its limit.

python -m benchmarks.families --out benchmarks/results/engine --name h200

All models run one after another in a process of their own, which is started again behind a model
that broke it.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_COMMON = "--max-batch 128 --no-prompt-graphs --kv-gib 48 --batches 1,32,128 --prompts 1x8192"
#: What is measured of each model; yarn with a context of 128k tokens, computed in chunks.
ROWS = {
    "gemma-3-12b": "--skip long,mixed,chunked --steps 32 --profile 1,128 --profile-prompt 8192",
    "phi-4-mini": "--skip long,mixed,chunked --steps 32 --profile 1,128 --profile-prompt 8192",
    "qwen3-8b": "--skip long,mixed,chunked --steps 32 --profile 1,128",
    "mistral-7b": "--skip long,mixed,chunked,profile --steps 32",
    "qwen3-8b-yarn": "--skip decode,prefill,mixed,profile --steps 32 --context 131000",
}
#: Of a row that begins so: its figure, and what that is to be at most (at least, of prefill).
LIMITS = {
    "decode batch 1 context 512": ("ratio_to_copy", 1.10),
    "decode batch 32": ("ratio_to_copy", 1.25),
    "decode batch 128": ("ratio_to_copy", 1.30),
    "long context": ("ratio", 1.15),
    "prefill": ("ratio_to_matrix", 0.80),
}


def commands(folder: Path, name: str, commit: str, models: Sequence[str]) -> Iterator[list[str]]:
    """Arguments of benchmarks.engine for each model."""
    for model in models:
        out = ["--out", str(folder / f"{name}-{model}.json"), "--commit", commit]
        yield ["--model", model, *_COMMON.split(), *ROWS[model].split(), *out]


def verdicts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows that have a limit, against it."""
    for row in rows:
        for begin, (figure, limit) in LIMITS.items():
            if row["what"].startswith(begin):
                found, least = row[figure], begin == "prefill"
                kept = found >= limit if least else found <= limit
                sign, word = (">=" if least else "<="), ("kept" if kept else "MISSED")
                yield f"{row['what']}: {found:.3f} {sign} {limit:.2f} {word}"


def measure(all_commands: Sequence[list[str]]) -> None:
    """Measure one model after another in this process."""
    import torch

    from benchmarks import engine
    from benchmarks.ranks import Ranks

    limits = None
    for command in all_commands:
        print("--", " ".join(command), flush=True)
        ranks = Ranks(rank=0, size=1, store=None)
        report = engine.run(engine.parse(command), ranks, command, limits)
        limits = report.limits  # those of an empty card: copies are slower among freed memory
        for line in verdicts(report.rows):
            print("==", command[1], line, flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Run them; a failure does not keep the next from running."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine"))
    parser.add_argument("--name", default="h200", help="of the card, in the files' names")
    parser.add_argument("--commit", default="", help="recorded instead of asking git")
    parser.add_argument("--models", default=",".join(ROWS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    models = args.models.split(",")
    if args.here:
        measure(list(commands(args.out, args.name, args.commit, models)))
        return
    failed = []
    while models:
        again = ["--out", str(args.out), "--name", args.name, "--commit", args.commit]
        command = [sys.executable, "-m", "benchmarks.families", *again, "--here"]
        for model in models:
            (args.out / f"{args.name}-{model}.json").unlink(missing_ok=True)
        subprocess.run([*command, "--models", ",".join(models)], check=False)
        while models and (args.out / f"{args.name}-{models[0]}.json").exists():
            models.pop(0)
        if models:
            failed.append(models.pop(0))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
