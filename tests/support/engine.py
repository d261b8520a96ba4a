"""Engines of tiny models, whole or with their ranks as threads of this process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch
from torch.distributed import HashStore

from engine.batch import SequenceStep, StepBatch, StepResult
from engine.config import EngineConfig
from engine.cpu.inputs import StepLimits, prepare_step
from engine.cpu.runner import RankRunner
from engine.kernels.base import StepInputs
from engine.ranks.tensor_parallel import TensorParallel
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NUM_BLOCKS = 60


def config(path: str, **changes: Any) -> EngineConfig:
    """Float32, small blocks, a pool of 64 blocks."""
    settings: dict[str, Any] = {
        "model_path": path,
        "dtype": "float32",
        "block_size": 8,
        "num_blocks": 64,
        "num_threads": 1,
    }
    return EngineConfig(**(settings | changes))


def int32(*numbers: int) -> bytes:
    """As a SequenceStep has what its penalties look at."""
    return array("i", numbers).tobytes()


def prompt(length: int, vocab: int = 100, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def hf_logits(path: str, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of every position by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]


def whole_runner(path: str, **changes: Any) -> RankRunner:
    """A single rank, ready to run."""
    runner = RankRunner(config(path, **changes), TensorParallel())
    runner.open(runner.choose_num_blocks())
    return runner


def chunk(
    tokens: Sequence[int],
    start: int,
    blocks: Sequence[int],
    sampling: SamplingParams | None = GREEDY,
) -> SequenceStep:
    """Part of a sequence."""
    return SequenceStep(
        tokens=tuple(tokens), start=start, block_tables=(tuple(blocks),), sampling=sampling
    )


def step_of(lengths: list[tuple[int, int]], block: int) -> StepInputs:
    """Sequences of (tokens before, tokens now), their blocks shuffled over a pool of NUM_BLOCKS."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    steps = []
    for before, now in lengths:
        needed = -(-(before + now) // block)
        blocks, free = free[:needed], free[needed:]
        steps.append(chunk([1] * now, before, blocks))
    limits = StepLimits(block_size=block, num_blocks=NUM_BLOCKS, vocab_size=2, max_model_len=1000)
    return prepare_step(StepBatch(sequences=tuple(steps)), limits).inputs


def logits_of(runner: RankRunner, batch: StepBatch) -> torch.Tensor | None:
    """The logits that a step samples from, in row order."""
    with torch.inference_mode():
        return runner.model.forward(runner.prepare(batch).groups, runner.pool.layers)[0]


class ThreadedRanks:
    """All ranks of one engine in this process, one thread each."""

    def __init__(self, path: str, size: int, **changes: Any) -> None:
        self._threads = ThreadPoolExecutor(size)
        store = HashStore()
        settings = config(path, tp_size=size, **changes)

        def build(rank: int) -> RankRunner:
            tp = TensorParallel(rank, size)
            runner = RankRunner(settings, tp)
            runner.open(runner.choose_num_blocks())
            tp.connect(store, "127.0.0.1", 60.0)
            return runner

        self.runners = list(self._threads.map(build, range(size)))
        first = self.runners[0]
        self.layout, self.fingerprint = first.layout, first.fingerprint
        self.vocab_size, self.max_model_len = first.vocab_size, first.max_model_len

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step on every rank; rank 0's tokens."""
        results = self._threads.map(lambda r: r.submit(r.prepare(batch)).wait(), self.runners)
        return next(iter(results))

    def logits(self, batch: StepBatch) -> torch.Tensor | None:
        """Rank 0's logits of a step."""
        results = self._threads.map(lambda r: logits_of(r, batch), self.runners)
        return next(iter(results))

    def close(self) -> None:
        """Leave the groups and end the threads."""
        list(self._threads.map(RankRunner.close, self.runners))
        self._threads.shutdown()
