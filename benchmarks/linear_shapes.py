"""Launch shapes of the linear kernel for some dozens of rows, measured on this card beside cuBLAS.

    python -m benchmarks.linear_shapes --model llama-3.1-8b --rows 32,64

Each time is that of one product inside a CUDA graph that goes through enough copies of the weights
to find none of them in the cache. The best go into engine.kernels.triton_split_linear.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu_limits import measure_limits, timed
from benchmarks.shapes import MODELS
from engine.kernels.triton_elementwise import silu_mul
from engine.kernels.triton_split_linear import (
    SplitScratch,
    SplitShape,
    block_rows,
    scratch_sizes,
    split_linear,
)
from engine.model.config import ModelConfig

_SHARED_BYTES = 220 << 10
_COLD_BYTES = 200 << 20
_COMPILERS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of a layer: `[n, k]` weights, `[2 n, k]` when gated."""

    name: str
    n: int
    k: int
    gated: bool = False

    @property
    def height(self) -> int:
        """Rows of the weights."""
        return 2 * self.n if self.gated else self.n


def products(model: ModelConfig, ranks: int) -> list[Product]:
    """The products of one rank's share of a layer, and the head."""
    heads = model.num_heads * model.head_dim // ranks
    kv = 2 * model.num_kv_heads * model.head_dim // ranks
    mlp = model.intermediate_size // ranks
    return [
        Product(name="qkv", n=heads + kv, k=model.hidden_size),
        Product(name="out", n=model.hidden_size, k=heads),
        Product(name="gate+up", n=mlp, k=model.hidden_size, gated=True),
        Product(name="down", n=model.hidden_size, k=mlp),
        Product(name="head", n=model.vocab_size // ranks, k=model.hidden_size),
    ]


def cuts(rows: int, gated: bool) -> Iterator[SplitShape]:
    """Candidates that fit a multiprocessor and keep enough bytes on their way."""
    for n, k, stages, warps in itertools.product((32, 64, 128), (64, 128, 256), (3, 4, 6), (4, 8)):
        size = stages * (n * (1 + gated) + block_rows(rows)) * k * 2
        if 40 << 10 <= size <= _SHARED_BYTES:
            yield SplitShape(block_n=n, block_k=k, splits=1, stages=stages, warps=warps)


def candidates(product: Product, rows: int, processors: int) -> Iterator[SplitShape]:
    """Cuts of one product with the splits that fill the card a few times over at most."""
    for cut in cuts(rows, product.gated):
        if product.n % cut.block_n or product.k % cut.block_k:
            continue
        tiles = product.n // cut.block_n
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            programs = tiles * splits
            steps = product.k // cut.block_k // splits
            if splits > 1 and (programs > 6 * processors or steps < cut.stages):
                continue
            if programs >= 0.7 * processors:
                yield SplitShape(**(asdict(cut) | {"splits": splits}))


class Timer:
    """Times one product over copies of its weights."""

    def __init__(self, product: Product, rows: int, device: torch.device) -> None:
        size = product.height * product.k * 2
        copies = max(2, -(-_COLD_BYTES // size))
        make = {"device": device, "dtype": torch.bfloat16}
        self.product = product
        self.x = torch.randn(rows, product.k, **make)  # type: ignore[call-overload]
        scale = product.k**-0.5
        self.weights = [
            torch.randn(product.height, product.k, **make).mul_(scale)  # type: ignore[call-overload]
            for _ in range(copies)
        ]
        self.out = torch.empty(rows, product.n, **make)  # type: ignore[call-overload]
        self.wide = torch.empty(rows, product.height, **make)  # type: ignore[call-overload]
        self.scratch = SplitScratch(device, 1 << 13, 1 << 24)
        self._stream = torch.cuda.Stream(device)

    def cublas(self, weight: torch.Tensor) -> None:
        """The product, and SwiGLU when gated, as the engine does them without the kernel."""
        if self.product.gated:
            torch.mm(self.x, weight.t(), out=self.wide)
            silu_mul(self.wide, out=self.out, pdl=True)
        else:
            torch.mm(self.x, weight.t(), out=self.out)

    def split(self, shape: SplitShape) -> Callable[[torch.Tensor], None]:
        """The product with one launch shape."""

        def run(weight: torch.Tensor) -> None:
            split_linear(
                self.x, weight, self.scratch, shape,
                out=self.out, gated=self.product.gated, pdl=True,
            )  # fmt: skip

        return run

    def error(self, shape: SplitShape) -> float:
        """Relative difference between the two."""
        self.cublas(self.weights[0])
        want = self.out.float()
        self.split(shape)(self.weights[0])
        return float((self.out.float() - want).norm() / want.norm())

    def seconds(self, run: Callable[[torch.Tensor], None]) -> float:
        """Of one product."""
        with torch.cuda.stream(self._stream):
            run(self.weights[0])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                for weight in self.weights * 2:
                    run(weight)
            graph.replay()
            return timed(graph.replay, 3) / (2 * len(self.weights))


def compile_some(mine: list[tuple[int, bool, SplitShape]]) -> None:
    """Have triton's cache filled with these kernels; runs in a process of its own."""
    device = torch.device("cuda", 0)
    for rows, gated, shape in mine:
        product = Product(name="", n=shape.block_n * 16, k=shape.block_k * 16, gated=gated)
        x = torch.zeros(rows, product.k, device=device, dtype=torch.bfloat16)
        weight = torch.zeros(product.height, product.k, device=device, dtype=torch.bfloat16)
        out = torch.zeros(rows, product.n, device=device, dtype=torch.bfloat16)
        for splits in (1, 2):
            cut = SplitShape(**(asdict(shape) | {"splits": splits}))
            scratch = SplitScratch(device, *scratch_sizes(rows, product.n, gated, cut))
            split_linear(x, weight, scratch, cut, out=out, gated=gated, pdl=True)
    torch.cuda.synchronize()


def compile_all(rows: list[int]) -> None:
    """Compile every candidate, many at a time; before this process touches the device."""
    todo = [(m, gated, cut) for m in rows for gated in (False, True) for cut in cuts(m, gated)]
    context = multiprocessing.get_context("fork")
    compilers = [
        context.Process(target=compile_some, args=(todo[i::_COMPILERS],)) for i in range(_COMPILERS)
    ]
    for compiler in compilers:
        compiler.start()
    for compiler in compilers:
        compiler.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", default="32,64")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = list(map(int, args.rows.split(",")))
    compile_all(rows)
    device = torch.device("cuda", 0)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    copy = measure_limits(device).copy
    figures = []
    for product in products(ModelConfig.from_dict(MODELS[args.model]), args.tp):
        for m in rows:
            timer = Timer(product, m, device)
            floor = product.height * product.k * 2 / copy
            base = timer.seconds(timer.cublas)
            tried = sorted(
                ((timer.seconds(timer.split(s)), s) for s in candidates(product, m, processors)),
                key=lambda pair: pair[0],
            )
            print(
                f"{product.name} rows {m}: bytes {floor * 1e6:.1f} us, cuBLAS {base * 1e6:.1f}, "
                f"best of {len(tried)}: {tried[0][0] * 1e6:.1f}, "
                f"error {timer.error(tried[0][1]):.1e}"
            )
            best = [asdict(shape) | {"us": seconds * 1e6} for seconds, shape in tried[:6]]
            for line in best:
                print("   ", line, flush=True)
            figures.append(
                {"product": asdict(product), "rows": m, "cublas_us": base * 1e6, "best": best}
            )
    if args.out:
        card = torch.cuda.get_device_name(device)
        report = {"card": card, "copy_tb_s": copy / 1e12, "figures": figures}
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
