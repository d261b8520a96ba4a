"""What quantising at load costs in quality: perplexity, and divergence from the unquantised model.

    python -m benchmarks.quality --model FOLDER --documents FILE.jsonl [--formats none,fp8,int4]
    BATON_NATIVE_KERNELS=0 python -m benchmarks.quality --model FOLDER --documents FILE.jsonl \
        --same --formats none,none+kv,fp8,fp8+row,fp8+128,fp8+row+kv,int4,int4+kv

Each document's first half is computed by the engine of one format, as a prefill worker does, and
the second half, on that KV, by the engine of another, as a decode worker does; with `--same` only
by the same. Perplexity is of the second half; KL is the divergence of the pair's distribution from
the unquantised model's, in nats a token.

A format is what the weights become at load, and what else is rounded to e4m3: KV (`kv`), and,
emulated here as on GPUs, the inputs of products, with a scale for each row (`row`, as in prompts
and large steps) or for 128 columns of it (`128`, of few rows). KV with other scales than 1 is
emulated, too: a power of two for the keys and for the values of a layer (`kv-layer`), any scale for
each block and head (`kv-block`). The output head is the CPUs' of that format, or quantised to INT8
(`head-int8`) or e4m3 (`head-fp8`), or stays (`head-none`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.batch import SequenceStep, StepBatch
from engine.config import EngineConfig, Quantization
from engine.cpu.runner import RankRunner
from engine.kernels.cpu.operations import CpuKernels
from engine.ranks.tensor_parallel import TensorParallel

_BLOCK = 16
#: Dims of a KV pool [block, k/v, head, token, dim] that share a scale.
_SHARED = {"kv-layer": (0, 2, 3, 4), "kv-block": (3, 4)}


class Half:
    """An engine that computes halves of documents."""

    def __init__(
        self, model: str, quantization: str | None, length: int, dtype: str, kv: str | None = None
    ) -> None:
        blocks = -(-2 * length // _BLOCK)
        config = EngineConfig(
            model_path=model,
            quantization=quantization,
            dtype=dtype,
            kv_dtype=kv,
            num_threads=1,
            block_size=_BLOCK,
            num_blocks=blocks,
        )
        self._runner = RankRunner(config, TensorParallel())
        self._runner.open(blocks)
        self._table = (tuple(range(blocks)),)

    def context(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """The KV of a first half."""
        self._run(ids, 0, ())
        return [layer.clone() for layer in self._runner.pool.layers]

    def logprobs(self, kv: Sequence[torch.Tensor], ids: Sequence[int], start: int) -> torch.Tensor:
        """Log-probabilities of what follows each of `ids`, on the KV of the tokens before."""
        for mine, layer in zip(self._runner.pool.layers, kv, strict=True):
            mine.copy_(layer)
        hidden = self._run(ids, start, ids)
        assert hidden is not None
        with torch.inference_mode():
            logits = self._runner.model.logits(hidden)
            assert logits is not None
            return logits.float().log_softmax(-1)

    def _run(self, ids: Sequence[int], start: int, targets: Sequence[int]) -> torch.Tensor | None:
        step = SequenceStep(
            tokens=tuple(ids),
            start=start,
            block_tables=self._table,
            targets=tuple(targets),
            sampling=None,
        )
        prepared = self._runner.prepare(StepBatch(sequences=(step,)))
        with torch.inference_mode():
            return self._runner.model.forward(prepared.groups, self._runner.pool.layers).hidden


def rounded(x: Tensor, group: int) -> Tensor:
    """x as its codes mean it."""
    width = x.shape[-1]
    whole = group == 0 or width % group
    wide = x.float().unflatten(-1, (1, width) if whole else (-1, group))
    scale = wide.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / 448.0
    codes = (wide / scale).to(torch.float8_e4m3fn)
    out: Tensor = (codes.float() * scale).flatten(-2).to(x.dtype)
    return out


def rounded_kv(pool: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The pool as its codes mean it, where `dims` share a scale."""
    wide = pool.float()
    scale = wide.abs().amax(dims, keepdim=True).clamp_(min=1e-12) / 448.0
    if 0 in dims:
        scale = scale.log2().ceil().exp2()
    codes = (wide / scale).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(pool.dtype)


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

    def __init__(self, group: int | None, *, kv: tuple[int, ...] | None) -> None:
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
            if kv is None:
                return
            write = self.rope_and_write_kv

            def write_rounded(qkv: Tensor, pool: Tensor, plan: Any) -> Tensor:
                q: Tensor = write(qkv, pool, plan)
                pool.copy_(rounded_kv(pool, kv))
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
        for name, kept in self._kept.items():
            setattr(CpuKernels, name, kept)


def engine_of(model: str, name: str, length: int, dtype: str) -> Half:
    """The engine of a format."""
    quantization, *parts = name.split("+")
    group = 0 if "row" in parts else 128 if "128" in parts else None
    scaled = next((dims for part, dims in _SHARED.items() if part in parts), None)
    heads = {"head-none": None, "head-int8": Quantization.INT8, "head-fp8": Quantization.FP8}
    head = next((part for part in parts if part in heads), None)
    changed: AbstractContextManager[object] = nullcontext()
    if head is not None:
        kind = heads[head]
        changed = patch("engine.cpu.runner._head", lambda _: kind)
    with Rounding(group, kv=scaled), changed:
        weights = None if quantization == "none" else quantization
        return Half(model, weights, length, dtype, "fp8" if "kv" in parts else None)


def main() -> None:
    """Print a table with a row for each pair of formats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--documents", required=True)
    parser.add_argument("--formats", default="none,fp8,int8,int4")
    parser.add_argument("--same", action="store_true", help="both halves in one format")
    parser.add_argument("--tokens", type=int, default=512, help="of each half of a document")
    parser.add_argument("--most", type=int, default=1 << 30, help="documents")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    length = options.tokens
    names = options.formats.split(",")
    pairs = [pair for pair in product(names, names) if not options.same or pair[0] == pair[1]]
    engines = {
        name: engine_of(options.model, name, length, options.dtype)
        for name in dict.fromkeys(["none", *names])
    }
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    losses: defaultdict[tuple[str, str], float] = defaultdict(float)
    divergences: defaultdict[tuple[str, str], float] = defaultdict(float)
    count = 0
    for line in Path(options.documents).read_text(encoding="utf-8").splitlines():
        ids = tokenizer.encode(json.loads(line)["text"]).ids[: 2 * length + 1]
        if len(ids) <= 2 * length or count >= options.most * length:
            continue
        count += length
        first, second = ids[:length], ids[length:-1]
        following = torch.tensor(ids[length + 1 :])[:, None]
        contexts = {name: engine.context(first) for name, engine in engines.items()}
        base = engines["none"].logprobs(contexts["none"], second, length)
        for pair in pairs:
            got = engines[pair[1]].logprobs(contexts[pair[0]], second, length)
            losses[pair] -= float(got.gather(1, following).sum())
            divergences[pair] += float((base.exp() * (base - got)).sum())
    print(f"{count} tokens")
    print("| prefill | decode | perplexity | KL |\n| --- | --- | --- | --- |")
    for pair in pairs:
        perplexity = math.exp(losses[pair] / count)
        print(f"| {pair[0]} | {pair[1]} | {perplexity:.3f} | {divergences[pair] / count:.5f} |")


if __name__ == "__main__":
    main()
