"""What workers drive: runs steps on all ranks of one engine."""

from __future__ import annotations

from typing import Protocol

from engine.batch import SequenceStep, StepBatch, StepResult
from engine.config import EngineConfig
from engine.kv.pool import KVPool
from engine.runner import RankRunner
from engine.tp import TensorParallel
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.sampling import SamplingParams


class PendingStep(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """Block until its tokens are on the host."""
        ...


class Executor(Protocol):
    """One engine, all of its ranks. Steps run in the order of their launch; one caller at a time."""

    layout: KVLayout
    fingerprint: KVFingerprint
    vocab_size: int
    max_model_len: int
    pool: KVPool

    def launch(self, batch: StepBatch) -> PendingStep:
        """Start a step. Raises RankLost when the engine is no longer whole."""
        ...

    def run(self, batch: StepBatch) -> StepResult:
        """`launch` and `wait`."""
        ...

    def warmup(self) -> None:
        """Run one real step, in block 0, before anything is served."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


class FinishedStep:
    """A step that ran while it was launched."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        """The tokens."""
        return self._result


class LocalExecutor:
    """Executor of a single rank in this process, synchronous."""

    def __init__(self, runner: RankRunner) -> None:
        self._runner = runner
        self.layout = runner.layout
        self.fingerprint = runner.fingerprint
        self.vocab_size = runner.vocab_size
        self.max_model_len = runner.max_model_len
        self.pool = runner.pool

    def launch(self, batch: StepBatch) -> PendingStep:
        """Run the step."""
        return FinishedStep(self._runner.run(batch))

    def run(self, batch: StepBatch) -> StepResult:
        """Run the step."""
        return self._runner.run(batch)

    def warmup(self) -> None:
        """A prompt chunk, then a decode."""
        for batch in warmup_batches(self.layout.block_size, self.max_model_len):
            self.run(batch)

    def close(self) -> None:
        """Leave the group."""
        self._runner.close()


def warmup_batches(block_size: int, max_model_len: int) -> list[StepBatch]:
    """A prompt of a few tokens and the decode after it, both in block 0."""
    tokens = max(1, min(8, block_size - 1, max_model_len - 1))
    sampling = SamplingParams(temperature=1.0)
    shapes = [((0,) * tokens, 0), ((0,), min(tokens, block_size - 1))]
    return [
        StepBatch(
            sequences=(
                SequenceStep(tokens=ids, start=start, block_ids=(0,), sampling=sampling),
            )
        )
        for ids, start in shapes
    ]


def build_executor(config: EngineConfig) -> Executor:
    """Load the model and its KV pool. Raises ModelRefused naming what cannot be served."""
    return LocalExecutor(RankRunner(config, TensorParallel()))
