"""What e4m3 inputs and e4m3 KV cost in quality beside weights in codes, as on GPUs.

    BATON_NATIVE_KERNELS=0 python -m benchmarks.quality_e4m3 --model FOLDER --documents FILE.jsonl

Emulated on CPUs: inputs of products become e4m3 codes with a scale for each row (as in prompts and
large steps) or for 128 columns of it (of few rows), KV e4m3 codes with the scale 1. Both halves of
a document are computed by one engine, otherwise as in `benchmarks.quality`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.quality import Half
from engine.kernels.cpu.operations import CpuKernels

#: name -> (quantization at load, columns of a scale of inputs (0: rows; None: as they are), KV).
FORMATS: dict[str, tuple[str | None, int | None, bool]] = {
    "bfloat16": (None, None, False),
    "bfloat16, KV fp8": (None, None, True),
    "fp8 weights": ("fp8", None, False),
    "fp8, inputs by row": ("fp8", 0, False),
    "fp8, inputs by 128 columns": ("fp8", 128, False),
    "fp8, inputs by row, KV fp8": ("fp8", 0, True),
    "int4 weights": ("int4", None, False),
    "int4 weights, KV fp8": ("int4", None, True),
}


def rounded(x: Tensor, group: int) -> Tensor:
    """x as its codes mean it."""
    width = x.shape[-1]
    whole = group == 0 or width % group
    wide = x.float().unflatten(-1, (1, width) if whole else (-1, group))
    scale = wide.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / 448.0
    codes = (wide / scale).to(torch.float8_e4m3fn)
    out: Tensor = (codes.float() * scale).flatten(-2).to(x.dtype)
    return out


class RoundingLinear:
    """A product whose input is rounded first."""

    def __init__(self, product: Any, group: int) -> None:
        self._product = product
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._product(rounded(x, self._group))
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum with a residual."""
        out: Tensor = self._product.add(rounded(x, self._group), residual)
        return out


class Rounding:
    """While entered, engines are built with kernels that round."""

    def __init__(self, group: int | None, *, kv: bool) -> None:
        self._group = group
        self._kv = kv
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> None:
        """Take the kernels' place."""
        for name in ("__init__", "linear", "gated_linear"):
            self._kept[name] = getattr(CpuKernels, name)
        group, kept, kv = self._group, self._kept, self._kv

        def made(self: Any, *args: Any, **named: Any) -> None:
            kept["__init__"](self, *args, **named)
            if not kv:
                return
            write = self.rope_and_write_kv

            def write_rounded(qkv: Tensor, pool: Tensor, plan: Any) -> Tensor:
                q: Tensor = write(qkv, pool, plan)
                codes = pool.float().clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
                pool.copy_(codes.to(pool.dtype))
                return q

            self.rope_and_write_kv = write_rounded

        def linear(self: Any, weight: Any, bias: Any) -> Any:
            product = kept["linear"](self, weight, bias)
            head = isinstance(weight, Tensor)  # it is not quantised
            return product if group is None or head else RoundingLinear(product, group)

        def gated(self: Any, *args: Any) -> Any:
            product = kept["gated_linear"](self, *args)
            return product if group is None else RoundingLinear(product, group)

        for name, changed in (("__init__", made), ("linear", linear), ("gated_linear", gated)):
            setattr(CpuKernels, name, changed)

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        for name, kept in self._kept.items():
            setattr(CpuKernels, name, kept)


def main() -> None:
    """Print a table with a row for each format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--documents", required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--most", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    length = options.tokens
    engines = {}
    for name, (quantization, group, kv) in FORMATS.items():
        with Rounding(group, kv=kv):
            engines[name] = Half(options.model, quantization, length, "bfloat16")
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    losses, divergences, count = dict.fromkeys(FORMATS, 0.0), dict.fromkeys(FORMATS, 0.0), 0
    for line in Path(options.documents).read_text(encoding="utf-8").splitlines():
        ids = tokenizer.encode(json.loads(line)["text"]).ids[: 2 * length + 1]
        if len(ids) <= 2 * length:
            continue
        first, second = ids[:length], ids[length:-1]
        following = torch.tensor(ids[length + 1 :])[:, None]
        base = None
        for name, engine in engines.items():
            got = engine.logprobs(engine.context(first), second, length)
            base = got if base is None else base
            losses[name] -= float(got.gather(1, following).sum())
            divergences[name] += float((base.exp() * (base - got)).sum())
        count += length
        print(count, {n: round(math.exp(losses[n] / count), 3) for n in FORMATS}, flush=True)
        if count >= options.most * length:
            break
    print(f"{count} tokens\n| format | perplexity | KL |\n| --- | --- | --- |")
    for name in FORMATS:
        print(
            f"| {name} | {math.exp(losses[name] / count):.3f} | {divergences[name] / count:.5f} |"
        )


if __name__ == "__main__":
    main()
