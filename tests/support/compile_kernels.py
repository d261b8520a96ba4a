"""Compile the kernels of tiny models for a GPU that is not there: `python -m
tests.support.compile_kernels FAMILY[:HEAD_DIM] ... codes:WEIGHTS[:KV] ... [windows] [packed]`.

The interpreter runs kernels as Python, and so accepts what triton's compiler does not. Here a CUDA
runner takes its warm-up steps and launches nothing: every launch stops once triton has made its
intermediate code, for compute capability 9.0.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.batch import StepBatch
from engine.cuda import runner
from engine.cuda.runner import CudaRunner
from engine.kernels.triton.attention import ScoreRule
from engine.kernels.triton.packed_prefill import packed_prefill
from engine.kernels.triton.prefill_attention import TILE_FIELDS, ChunkScratch, ChunkSpan
from engine.kernels.triton.windowed_prefill import plan_window, windowed_prefill
from tests.support import cuda

HOPPER = GPUTarget("cuda", 90, 32)


class AbsentGpu:
    """Names a device to compile for."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def stop_before_launches() -> list[str]:
    """Have launches compile, to intermediate code only. Returns the names of what was compiled."""
    compiled: list[str] = []
    add_stages, run = CUDABackend.add_stages, JITFunction.run

    def intermediate_only(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(self, stages, *rest)
        for name in ("llir", "ptx", "cubin"):
            stages.pop(name, None)

    def made(*_parts: Any) -> SimpleNamespace:
        """Stands for a compiled kernel, whose launch does nothing."""
        return SimpleNamespace(function=None, packed_metadata=None, run=lambda *_values: None)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        compiled.append(self.fn.__name__)
        return run(self, *args, grid=grid, warmup=True, **named)

    CUDABackend.add_stages = intermediate_only
    JITFunction.run = compile_only
    compiler.CompiledKernel = made
    driver.set_active(AbsentGpu())
    return compiled


def runner_of(name: str) -> CudaRunner:
    """A family's, or one with quantised weights and KV."""
    from tests.unit.engine.cuda import test_coded_steps

    family, *rest = name.split(":")
    if family == "codes":
        weights, kv_dtype = rest[0], rest[1] if rest[1:] else None
        return cuda.make_runner(
            torch.device("cpu"),
            cuda.tiny_config(**test_coded_steps.SIZES, vocab_size=256),
            dtype="bfloat16",
            quantization=weights,
            kv_dtype=kv_dtype,
            split_rows=16,  # chunks are many rows then
        )
    changes, _ = cuda.FAMILIES[family]
    if rest:
        changes = changes | {"head_dim": int(rest[0])}
    return cuda.make_runner(torch.device("cpu"), cuda.tiny_config(**changes), dtype="bfloat16")


def compile_windows() -> None:
    """Attention of long chunks with a window, which only GPUs with a copy engine have."""
    for dim, softcap in ((128, 0.0), (256, 5.0)):
        qkv = torch.zeros(2048, 8 * dim, dtype=torch.bfloat16)
        span = ChunkSpan(first_row=0, count=2048, start=0, table=0)
        tiles = torch.tensor(plan_window(span, 600, 2).tiles, dtype=torch.int32)
        rule = ScoreRule(scale=1.0, softcap=softcap, window=600)
        out = qkv.new_zeros(2048, 4 * dim)
        windowed_prefill(qkv, tiles, rule, num_heads=4, kv_heads=2, out=out)


def compile_packed() -> None:
    """Attention of chunks whose query heads share tiles, which only such GPUs have."""
    kinds = ((torch.bfloat16, 8, 2, 128, True), (torch.float16, 7, 1, 64, False))
    for dtype, heads, kv_heads, dim, pdl in kinds:
        qkv = torch.zeros(64, (heads + 2 * kv_heads) * dim, dtype=dtype)
        pool = torch.zeros(4, 2, kv_heads, 16, dim, dtype=dtype)
        numbers = torch.zeros(64, TILE_FIELDS, dtype=torch.int32)
        scratch = ChunkScratch(heads, dim, dtype, qkv.device)
        rule, out = ScoreRule(scale=1.0), qkv.new_zeros(64, heads * dim)
        rest = (numbers, numbers[0], scratch, rule)
        packed_prefill(qkv, pool, *rest, num_heads=heads, out=out, counts=numbers[1], pdl=pdl)


#: What only some GPUs run, which tiny models on a CPU do not show.
APART = {"windows": compile_windows, "packed": compile_packed}


def main(families: list[str]) -> None:
    """Print the names of the kernels that each family's warm-up launches; fail at the first that
    does not compile."""
    compiled = stop_before_launches()
    runner.multiplies_codes = lambda dtype, device: True
    for name in sorted(APART.keys() & families):
        families.remove(name)
        APART[name]()
        print(name, *sorted(set(compiled)))
        compiled.clear()
    for name in families:
        started = runner_of(name)
        started.start()
        decodes = StepBatch(sequences=tuple(cuda.seq((9,), 0, (block,)) for block in range(3)))
        for batch in (*started.warmup_batches(), cuda.for_groups(decodes, started.layout)):
            started.run(batch)
        print(name, *sorted(set(compiled)))
        compiled.clear()


if __name__ == "__main__":
    main(sys.argv[1:])
