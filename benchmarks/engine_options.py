"""Command-line options that every benchmark of an engine has."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.shapes import MODELS
from engine.cuda.options import CudaOptions


def engine_parser(description: str) -> argparse.ArgumentParser:
    """Options of every benchmark of an engine."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", help="of the weights: fp8 or int4")
    parser.add_argument("--kv-dtype", help="fp8")
    parser.add_argument("--kv-gib", type=int, help="of the KV pool; default: what is free")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="recorded instead of asking git")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--split-rows", type=int, default=64, help="most rows on its own products")
    parser.add_argument(
        "--prompt-graphs", action=argparse.BooleanOptionalAction, default=True,
        help="graphs of short prompts",
    )  # fmt: skip
    return parser


def options_of(args: argparse.Namespace) -> CudaOptions:
    """What they ask of the engine."""
    return CudaOptions(
        max_batch=args.max_batch,
        split_rows=args.split_rows,
        prompt_graphs=args.prompt_graphs,
    )
