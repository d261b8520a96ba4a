"""Candidates for the launch shapes of a decode step's kernels, and their compilation beforehand."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.shapes import MODELS
from engine.config import EngineConfig
from engine.cuda.layout import DecodeRows
from engine.kernels import triton_attention, triton_linear, triton_reduce, triton_split_linear
from engine.kernels.triton_attention import DecodeShape
from engine.kernels.triton_linear import LinearShape
from engine.kernels.triton_split_linear import SplitShape
from engine.model.config import ModelConfig

#: (n, k, gated) of a product.
Key = tuple[int, int, bool]
_COMPILERS = 20
_SHARED_BYTES = 225 << 10


def row_shapes(gated: bool) -> list[LinearShape]:
    """Candidates for one row."""
    cuts = [(4, 1024, 1, 4), (4, 1024, 2, 4), (4, 512, 3, 4), (8, 512, 1, 4), (2, 2048, 1, 4)]
    if gated:
        cuts += [(2, 1024, 1, 4), (2, 1024, 2, 4), (2, 1024, 3, 4), (2, 512, 3, 4), (2, 512, 4, 4)]
        cuts += [(1, 2048, 1, 4), (1, 2048, 2, 4), (2, 2048, 1, 8), (4, 1024, 1, 8), (4, 512, 1, 4)]
    else:
        cuts += [(4, 2048, 1, 8), (4, 2048, 2, 8), (8, 1024, 1, 8), (4, 1024, 3, 4), (8, 512, 3, 4)]
        cuts += [(2, 1024, 2, 2), (2, 1024, 3, 4), (1, 4096, 1, 4), (2, 4096, 1, 8), (4, 512, 4, 4)]
    shapes = [LinearShape(block_n=n, block_k=k, stages=s, warps=w) for n, k, s, w in cuts]
    if gated:
        shapes.append(replace(shapes[5], registers=72))
        shapes.append(replace(shapes[1], registers=96))
    return shapes


def split_shapes(rows: int, key: Key) -> list[SplitShape]:
    """Candidates for some dozens of rows."""
    n, k, gated = key
    found = []
    norm_follows = n == k or n < k
    for block_n, block_k, stages, warps in (
        (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 4), (64, 128, 6, 4), (64, 256, 3, 4),
        (64, 256, 4, 4), (64, 64, 6, 4), (128, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 8),
    ):  # fmt: skip
        stage = (block_n * (1 + gated) + triton_split_linear.block_rows(rows)) * block_k * 2
        if n % block_n or k % block_k or stage * stages > _SHARED_BYTES:
            continue
        if norm_follows and block_n != 64:  # the products behind the norm are compiled for that
            continue
        tiles = n // block_n
        for splits in (1, 2, 3, 4, 6):
            full = 90 <= tiles * splits <= 420 and k // block_k // splits >= stages
            if full or (splits == 1 and tiles > 420):
                found.append((block_n, block_k, splits, stages, warps))
    return [
        SplitShape(block_n=n, block_k=k, splits=s, stages=t, warps=w) for n, k, s, t, w in found
    ]


def attention_shapes(now: DecodeShape) -> list[DecodeShape]:
    """Candidates for decode attention."""
    cuts = [(64, 3, 2), (64, 2, 2), (64, 3, 4), (64, 2, 4), (32, 3, 2), (32, 3, 4), (128, 2, 4)]
    cuts += [(16, 3, 1), (32, 3, 1), (128, 2, 8)]
    return [
        replace(now, splits=splits, tile=tile, stages=stages, warps=warps)
        for splits in sorted({max(1, now.splits // 2), now.splits, now.splits * 2})
        for tile, stages, warps in cuts
        if splits <= 64
    ]


def keys_of(model: ModelConfig, ranks: int) -> dict[str, Key]:
    """(n, k, gated) of one rank's products."""
    heads = model.num_heads * model.head_dim // ranks
    kv = 2 * model.num_kv_heads * model.head_dim // ranks
    mlp, hidden = model.intermediate_size // ranks, model.hidden_size
    return {
        "gate+up": (mlp, hidden, True),
        "down": (hidden, mlp, False),
        "qkv": (heads + kv, hidden, False),
        "out": (hidden, heads, False),
        "head": (model.vocab_size // ranks, hidden, False),
    }


def compile_some(jobs: Sequence[tuple[Key, Any, dict[str, Any]]]) -> None:
    """Fill triton's cache; runs in a process of its own."""
    triton_reduce.MAX_POLLS = 1  # nobody answers here
    for (n, k, gated), shape, how in jobs:
        make: dict[str, Any] = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16}
        if isinstance(shape, DecodeShape):
            compile_attention(how["model"], how["tp"], shape)
            continue
        rows = how["rows"]
        x, w = torch.zeros(rows, k, **make), torch.zeros(2 * n if gated else n, k, **make)
        out, gain = torch.zeros(rows, n, **make), torch.zeros(max(n, k), **make)
        if how.get("turn"):
            triton_linear.shared_linear(x, w, _fake_turn(how["turn"]), h=out, pdl=True, shape=shape)
        elif rows == 1:
            triton_linear.linear(
                x, w, out=out, gated=gated, pdl=True, shape=shape,
                gain=gain if how["norm"] else None, residual=None if how["norm"] else out,
            )  # fmt: skip
        else:
            scratch = triton_split_linear.SplitScratch(make["device"], 1 << 13, 1 << 23)
            squares = torch.zeros(how["hidden"] // how["tile"], 64, device=make["device"])
            following = triton_split_linear.NextInput(gain=gain, x=out, squares=squares)
            triton_split_linear.split_linear(
                x, w, scratch, shape, out=out, gated=gated, pdl=True,
                squares=squares if how["norm"] else None, residual=None if how["norm"] else out,
                following=None if how["norm"] else following,
            )  # fmt: skip
    torch.cuda.synchronize()


def compile_attention(model: ModelConfig, ranks: int, shape: DecodeShape) -> None:
    """One cut of decode attention."""
    make: dict[str, Any] = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16}
    heads, kv_heads, dim = model.num_heads // ranks, model.num_kv_heads // ranks, model.head_dim
    qkv = torch.zeros(16, (heads + 2 * kv_heads) * dim, **make)
    pool = torch.zeros(1, 2, kv_heads, EngineConfig(model_path="random").block_size, dim, **make)
    table = torch.zeros(64, dim // 2, device=make["device"])
    rows = DecodeRows(16, 64, make["device"])
    scratch = triton_attention.DecodeScratch(16, 16 * 64, heads, dim, make["device"])
    triton_attention.decode_attention(
        qkv, table, table, pool, rows.indptr, rows.blocks, rows.lengths, scratch, shape,
        num_heads=heads, scale=0.1, out=torch.zeros(16, heads * dim, **make), pdl=True,
    )  # fmt: skip


def _fake_turn(size: int) -> triton_reduce.Turn:
    device = torch.device("cuda", 0)
    capacity = 1 << 14
    box = torch.zeros(2 * size * capacity, dtype=torch.int64, device=device)
    boxes = triton_reduce.Mailboxes(
        addresses=torch.tensor([box.data_ptr()] * size, device=device),
        done=torch.zeros(1, dtype=torch.int32, device=device),
        failed=torch.zeros(1, dtype=torch.int32, device=device),
        capacity=capacity, rank=0, size=size,
    )  # fmt: skip
    return triton_reduce.Turn(boxes=boxes, index=0)


def compile_all(candidates: dict[str, list[Any]], keys: dict[str, Key], args: Any) -> None:
    """Compile every candidate, many at a time; before this process touches the device."""
    jobs = []
    for name, shapes in candidates.items():
        added = name in ("out", "down")
        how = {"rows": args.rows, "norm": not added, "hidden": keys["out"][0], "tile": 64}
        if added and args.tp > 1:
            how["turn"] = args.tp
        cuts = {s if args.rows == 1 else replace(s, splits=min(s.splits, 2)) for s in shapes}
        jobs += [(keys[name], shape, how) for shape in cuts]
    if "attention" in args.tune:
        how = {"model": ModelConfig.from_dict(MODELS[args.model]), "tp": args.tp}
        cuts = {replace(shape, splits=8) for shape in attention_shapes(DecodeShape(splits=8))}
        jobs += [((0, 0, False), shape, how) for shape in cuts]
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=compile_some, args=(jobs[i::_COMPILERS],)) for i in range(_COMPILERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
