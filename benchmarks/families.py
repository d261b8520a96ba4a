"""Decode and prefill of several families on one GPU, each model in a process of its own.

python -m benchmarks.families --out benchmarks/results/engine --name h200
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_COMMON = "--max-batch 128 --no-prompt-graphs --batches 1,32,128 --prompts 1x8192 --steps 32"
#: What is measured of each model; yarn with a context of 128k tokens, computed in chunks.
ROWS = {
    "qwen3-8b": "--skip long,mixed,chunked,profile",
    "mistral-7b": "--skip long,mixed,chunked,profile",
    "gemma-3-12b": "--skip long,mixed,chunked --profile 1,32",
    "phi-4-mini": "--skip long,mixed,chunked,profile",
    "qwen3-8b-yarn": "--skip decode,prefill,mixed,profile --context 131000",
}


def commands(folder: Path, name: str, commit: str) -> Iterator[list[str]]:
    """Arguments of benchmarks.engine for each model."""
    for model, rows in ROWS.items():
        out = ["--out", str(folder / f"{name}-{model}.json"), "--commit", commit]
        yield ["--model", model, *_COMMON.split(), *rows.split(), *out]


def main() -> None:
    """Run them one after another; a failure does not keep the next from running."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine"))
    parser.add_argument("--name", default="h200", help="of the card, in the files' names")
    parser.add_argument("--commit", default="", help="recorded instead of asking git")
    args = parser.parse_args()
    failed = []
    for command in commands(args.out, args.name, args.commit):
        print("--", " ".join(command), flush=True)
        engine = [sys.executable, "-m", "benchmarks.engine", *command]
        if subprocess.run(engine, check=False).returncode:
            failed.append(command[1])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
