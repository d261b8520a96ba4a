"""The products of decode layers by format and rows, with launch shapes tried one after the other.

    python -m benchmarks.products --rows 1,16,32,64 --forms fp8,int4

Layers are chained as a step chains them, in a CUDA graph, over weights that do not fit the L2
cache: a product alone tells little, because kernels overlap. `--compile i/n` only compiles every
n-th shape, so that processes side by side fill triton's cache first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_limits import timed
from engine.kernels.triton.coded import CODE_GROUP, CodedRows, CodedWeight, pair_words
from engine.kernels.triton.codes import coded_product, gated_codes, row_codes
from engine.kernels.triton.elementwise import gated_product, rms_norm
from engine.kernels.triton.linear import LinearShape, default_shape, linear, pair_shape
from engine.kernels.triton.split_linear import (
    MAX_ROWS,
    NextInput,
    SplitScratch,
    SplitShape,
    split_linear,
    split_shape,
)

#: name -> (outputs, inputs, gated) of an 8B model's layer.
PRODUCTS = {
    "qkv": (6144, 4096, False),
    "out": (4096, 4096, False),
    "gate_up": (14336, 4096, True),
    "down": (4096, 14336, False),
}
LAYERS = 8
#: Columns that share a scale and a zero point of int4.
GROUP = 64
FORMS = ("bf16", "fp8", "int4", "scaled")
Shapes = dict[str, Any]


def make_weight(form: str, n: int, k: int, device: torch.device) -> Tensor | CodedWeight:
    """Random bytes; their numbers do not matter."""
    if form == "bf16":
        return torch.empty(n, k, device=device, dtype=torch.bfloat16).normal_(0.0, k**-0.5)
    if form == "int4":
        pairs = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
        scales = torch.rand(k // GROUP, n, device=device) * 0.01
        zeros = torch.randint(0, 16, (k // GROUP, n), device=device)
        words, unit = pair_words(scales, zeros)
        return CodedWeight(codes=pairs, scales=words, unit=unit, takes_codes=False)
    codes = torch.randint(0, 120, (n, k), device=device, dtype=torch.uint8)
    scales = torch.rand(1, n, device=device) * 1e-4
    return CodedWeight(codes=codes.view(torch.float8_e4m3fn), scales=scales)


class Chain:
    """Layers of one form, and what runs them for some rows with given launch shapes."""

    layers: list[dict[str, Any]]

    def __init__(self, form: str, device: torch.device) -> None:
        self.form = form
        self.device = device
        self.layers = [
            {
                name: make_weight(form, n * (1 + gated), k, device)
                for name, (n, k, gated) in PRODUCTS.items()
            }
            for _ in range(LAYERS)
        ]
        self.gain = torch.ones(4096, device=device, dtype=torch.bfloat16)
        self.scratch = SplitScratch(device, 4096, 1 << 26)

    @property
    def layer_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.layers[0].values())

    def runner(self, rows: int, shapes: Shapes) -> Callable[[], None]:
        """Puts all layers on the stream."""
        if self.form == "scaled":
            return lambda: self.scaled(rows)
        if all(isinstance(shape, LinearShape) for shape in shapes.values()):
            return lambda: self.one_row(shapes)
        return lambda: self.few_rows(rows, shapes)

    def empty(self, rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, device=self.device, dtype=torch.bfloat16)

    def one_row(self, shapes: Shapes) -> None:
        h, qkv, act = (self.empty(1, width) for width in (4096, 6144, 14336))
        norm: dict[str, Any] = {"gain": self.gain, "eps": 1e-5, "pdl": True}
        for layer in self.layers:
            linear(h, layer["qkv"], out=qkv, shape=shapes["qkv"], **norm)
            linear(qkv[:, :4096], layer["out"], out=h, residual=h, shape=shapes["out"], pdl=True)
            linear(h, layer["gate_up"], out=act, gated=True, shape=shapes["gate_up"], **norm)
            linear(act, layer["down"], out=h, residual=h, shape=shapes["down"], pdl=True)

    def few_rows(self, rows: int, shapes: Shapes) -> None:
        h, qkv, attended = (self.empty(rows, width) for width in (4096, 6144, 4096))
        x: Tensor | CodedRows = self.empty(rows, 4096)
        act: Tensor | CodedRows = self.empty(rows, 14336)
        into: Tensor | CodedRows = attended
        if self.form == "fp8":
            x, act, into = (CodedRows.grouped(rows, k, self.device) for k in (4096, 14336, 4096))

        def following(name: str) -> NextInput:
            tiles = 4096 // shapes[name].block_n
            squares = torch.empty(tiles, MAX_ROWS, device=self.device)
            return NextInput(gain=self.gain, x=x, squares=squares)

        def run(layer: dict[str, Any], name: str, source: Tensor | CodedRows, **more: Any) -> None:
            split_linear(
                source, layer[name], self.scratch, shapes[name], eps=1e-5, pdl=True, **more
            )

        squares = None
        for layer in self.layers:
            run(layer, "qkv", x, out=qkv, squares=squares)
            if isinstance(into, CodedRows):
                row_codes(attended, out=into, pdl=True)
            after = following("out")
            run(layer, "out", into, out=h, residual=h, following=after)
            run(layer, "gate_up", x, out=act, squares=after.squares, gated=True)
            after = following("down")
            run(layer, "down", act, out=h, residual=h, following=after)
            squares = after.squares

    def scaled(self, rows: int) -> None:
        h, qkv, attended, gate_up, delta = (
            self.empty(rows, width) for width in (4096, 6144, 4096, 28672, 4096)
        )
        x, act = (CodedRows.many(rows, k, self.device) for k in (4096, 14336))
        for layer in self.layers:
            row_codes(h, out=x, gain=self.gain, eps=1e-5, delta=delta, pdl=True)
            coded_product(x, layer["qkv"], out=qkv, bias=None)
            row_codes(attended, out=x, pdl=True)
            coded_product(x, layer["out"], out=delta, bias=None)
            row_codes(h, out=x, gain=self.gain, eps=1e-5, delta=delta, pdl=True)
            coded_product(x, layer["gate_up"], out=gate_up, bias=None)
            gated_codes(gate_up, out=act, pdl=True)
            coded_product(act, layer["down"], out=delta, bias=None)

    def cublas(self, rows: int) -> None:
        h, x, qkv, attended, gate_up, act = (
            self.empty(rows, width) for width in (4096, 4096, 6144, 4096, 28672, 14336)
        )
        for layer in self.layers:
            rms_norm(h, self.gain, 1e-5, out=x, pdl=True)
            torch.mm(x, layer["qkv"].t(), out=qkv)
            torch.addmm(h, attended, layer["out"].t(), out=h)
            rms_norm(h, self.gain, 1e-5, out=x, pdl=True)
            torch.mm(x, layer["gate_up"].t(), out=gate_up)
            gated_product(gate_up, out=act, pdl=True)
            torch.addmm(h, act, layer["down"].t(), out=h)

    def layer_us(self, run: Callable[[], None]) -> float:
        """Microseconds of a layer, replayed from a graph."""
        stream = torch.cuda.Stream(self.device)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        return timed(graph.replay, 9) / LAYERS * 1e6


def starting(form: str, rows: int) -> Shapes:
    """A launch shape of each product to begin with."""
    return {name: next(candidates(form, rows, name)) for name in PRODUCTS}


def candidates(form: str, rows: int, name: str) -> Iterator[Any]:
    """Launch shapes to try, the most likely first."""
    n, k, gated = PRODUCTS[name]
    if form == "bf16":
        shape = split_shape(rows, n, k, gated)
        assert shape is not None
        yield shape
    elif rows == 1:
        yield default_shape(n, k, gated, coded=True) if form == "fp8" else pair_shape(gated)
        yield from row_candidates(n, k, gated, form)
    elif form == "fp8":
        yield from coded_candidates(rows, n, k, gated)
    else:
        yield from pair_candidates(rows, n, k, gated)


def row_candidates(n: int, k: int, gated: bool, form: str) -> Iterator[LinearShape]:
    """Programs that keep the row, as many as divide the tiles evenly and fit the card together."""
    cuts = [(4, 4, 512), (4, 4, 768), (8, 4, 256), (8, 4, 384), (8, 8, 256), (4, 8, 256)]
    if gated:
        cuts = [(4, 4, 256), (4, 4, 384), (2, 4, 512), (2, 4, 640), (4, 8, 224), (8, 8, 128)]
    if k > 8192:
        cuts = [(4, 8, 128), (4, 8, 256), (2, 8, 256), (2, 8, 512), (8, 8, 128), (4, 4, 256)]
    for block_n, warps, programs in cuts:
        if programs * block_n <= n:
            yield LinearShape(block_n=block_n, block_k=0, stages=1, warps=warps, programs=programs)


def coded_candidates(rows: int, n: int, k: int, gated: bool) -> Iterator[SplitShape]:
    """Tiles of a scale's outputs."""
    block_m = max(16, 1 << (rows - 1).bit_length())
    tiles = n // CODE_GROUP
    stage = (CODE_GROUP * (1 + gated) + block_m) * CODE_GROUP
    for programs in (132, 264, 396):
        splits = max(1, min(programs // tiles, k // 512))
        for warps in (4, 8) if rows > 16 else (4,):
            for stages in (3, 4, 6):
                if stages * stage <= 220 << 10:
                    yield SplitShape(
                        block_n=CODE_GROUP, block_k=CODE_GROUP, splits=splits, stages=stages,
                        warps=warps,
                    )  # fmt: skip


def pair_candidates(rows: int, n: int, k: int, gated: bool) -> Iterator[SplitShape]:
    block_m = 8 if rows <= 8 else max(16, 1 << (rows - 1).bit_length())
    few = ((64, 2), (32, 2)) if block_m <= 16 else ((128, 8), (64, 4))
    for block_n, warps in few:
        for unroll in (2, 1):
            columns = unroll * GROUP
            tiles, steps = n // block_n, k // (2 * columns)
            for programs in (264, 528, 792) if block_m <= 16 else (132, 264):
                splits = max(1, programs // tiles)
                stage = (block_n * (1 + gated) + block_m * 4) * columns
                resident = -(-tiles * splits // 132)
                if splits > steps // 2 or (block_n == 32 and (unroll == 1 or gated)):
                    continue
                yield SplitShape(
                    block_n=block_n, block_k=GROUP, splits=splits, warps=warps, block_m=block_m,
                    unroll=unroll, stages=max(2, min(5, (216 << 10) // resident // stage)),
                )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch shape of one product."""

    form: str
    rows: int
    name: str
    shape: Any


def cases(forms: list[str], rows: list[int]) -> list[Case]:
    """All of them, each once."""
    return [
        Case(form=form, rows=m, name=name, shape=shape)
        for form in forms
        if form != "scaled"
        for m in rows
        if not (form == "bf16" and m == 1)
        for name in PRODUCTS
        for shape in dict.fromkeys(candidates(form, m, name))
    ]


def compile_share(forms: list[str], rows: list[int], index: int, count: int) -> None:
    """Compile every `count`-th case by running it."""
    device = torch.device("cuda")
    chains: dict[str, Chain] = {}
    global LAYERS
    LAYERS = 1
    for case in cases(forms, rows)[index::count]:
        chain = chains.setdefault(case.form, Chain(case.form, device))
        try:
            chain.runner(case.rows, starting(case.form, case.rows) | {case.name: case.shape})()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a shape that does not fit is not tried
            print(case, repr(error)[:160], flush=True)


def tune(chain: Chain, rows: int, brief: bool) -> Shapes:
    """Try every shape of every product; print their times, if brief the three best."""
    form, best = chain.form, starting(chain.form, rows)
    for name in PRODUCTS:
        figures = []
        for shape in dict.fromkeys(candidates(form, rows, name)):
            try:
                us = chain.layer_us(chain.runner(rows, best | {name: shape}))
            except Exception as error:  # noqa: BLE001 - a shape that does not fit is not tried
                print("failed", form, rows, name, shape, repr(error)[:120])
                continue
            figures.append((us, shape))
        figures.sort(key=lambda entry: entry[0])
        if figures:
            best = best | {name: figures[0][1]}
        for us, shape in figures[:3] if brief else figures:
            print(f"  {form} {rows} {name} {us:.1f} {describe(shape)}")
    return best


def measure(chain: Chain, rows: int, copy: float, brief: bool) -> list[dict[str, Any]]:
    """Print a layer's time with the library's products and with the best shapes; these."""
    form, floor = chain.form, chain.layer_bytes / copy * 1e6
    if form == "scaled":
        us = chain.layer_us(chain.runner(rows, {}))
        print(f"{form} {rows} rows: {us:.1f} us, bytes {floor:.1f}")
        return []
    if form == "bf16":
        print(f"cublas {rows} rows: {chain.layer_us(partial(chain.cublas, rows)):.1f} us")
        if rows == 1 or rows > MAX_ROWS:
            return []
    best = tune(chain, rows, brief)
    us = chain.layer_us(chain.runner(rows, best))
    print(f"{form} {rows} rows: {us:.1f} us a layer, bytes {floor:.1f}, ratio {us / floor:.2f}")
    sys.stdout.flush()
    return [
        {"form": form, "rows": rows, "name": name, "us": us, **asdict(shape)}
        for name, shape in best.items()
    ]


def describe(shape: Any) -> str:
    return " ".join(f"{name}={getattr(shape, name)}" for name in shape.__slots__)


def main() -> None:
    """Compile a share or measure all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rows", default="1,4,16,32,64")
    parser.add_argument("--compile", default="")
    parser.add_argument("--brief", action="store_true", help="only the three best of each product")
    parser.add_argument("--out", type=Path, help="JSON of the best shapes")
    args = parser.parse_args()
    forms, rows = args.forms.split(","), [int(text) for text in args.rows.split(",")]
    if args.compile:
        index, count = map(int, args.compile.split("/"))
        compile_share(forms, rows, index, count)
        return
    device = torch.device("cuda")
    source = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copy = 2.0 * source.nbytes / timed(lambda: target.copy_(source), 10)
    print(f"copy {copy / 1e12:.2f} TB/s")
    chains = [Chain(form, device) for form in forms]
    found = []
    for m in rows:
        for chain in chains:
            found += measure(chain, m, copy, args.brief)
            if args.out is not None:
                args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
