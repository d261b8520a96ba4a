"""Rank 0 of an engine on GPUs, behind the same Executor as on a CPU."""

from __future__ import annotations

from engine.batch import StepBatch, StepResult
from engine.cuda.runner import CudaRunner
from engine.cuda.warmup import warmup_steps
from engine.executor import PendingStep
from engine.ranks import RankGroup
from protocol.kv_layout import KVFingerprint


class CudaExecutor:
    """Executor of rank 0 in this process: alone, or with the followers of a group.

    `launch` returns while the step runs; the next step may be launched before its tokens are known,
    its sequences naming the ones they go on from (SequenceStep.previous).
    """

    depth = 2

    def __init__(
        self, runner: CudaRunner, fingerprint: KVFingerprint, group: RankGroup | None = None
    ) -> None:
        self._runner = runner
        self._closed = False
        self._group = group
        if group is not None:
            runner.watch = group.check
        self.layout = runner.layout
        self.fingerprint = fingerprint
        self.vocab_size = runner.vocab_size
        self.max_model_len = runner.max_model_len
        self.pool = runner.pool

    def launch(self, batch: StepBatch) -> PendingStep:
        """Check the batch, have the followers start on it, put it on this rank's stream."""
        plan = self._runner.prepare(batch)
        if self._group is not None:
            self._group.step(batch)
        return self._runner.submit(plan)

    def run(self, batch: StepBatch) -> StepResult:
        """`launch` and `wait`."""
        return self.launch(batch).wait()

    def use_threads(self, count: int) -> None:
        """Nothing: a step takes one thread, which launches."""

    def enter_thread(self) -> None:
        """Plan prompt attention again: what the thread that loaded has planned is its own. Equally
        long prompts in one step are too rare to start later for."""
        self._runner.plan_attention(1)

    def warmup(self) -> None:
        """Have every kernel compiled that a step can need."""
        for batch in warmup_steps(
            block_size=self.layout.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        ):
            self.run(batch)

    def close(self) -> None:
        """Leave the tensor group; the followers end with their RankGroup. Idempotent."""
        if not self._closed:
            self._closed = True
            self._runner.close()
