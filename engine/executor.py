"""Runs steps on all ranks of one engine; workers drive it, and build it here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from engine.batch import StepBatch, StepResult
from engine.config import EngineConfig
from engine.cpu.runner import RankRunner
from engine.errors import ModelRefused
from engine.kv.sizing import weight_format
from engine.ranks.follower import Follower, Handler
from engine.ranks.group import RankGroup, RankInvite
from engine.ranks.tensor_parallel import TensorParallel
from protocol.errors import InvalidRequest
from protocol.kv_layout import KVFingerprint

if TYPE_CHECKING:
    from engine.cuda.runner import CudaRunner


class PendingStep(Protocol):
    """A step that was launched. `number` is its number in the pool's step events, 0 when the step
    ended within `launch`."""

    number: int

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not block."""

    def wait(self) -> StepResult:
        """Block until its tokens are on the host."""


class Executor:
    """One engine: rank 0 in this process, alone or with the followers of a group.

    Steps run in the order of launch; calls come from one thread. depth: launched steps that keep
    the engine busy without a gap: 1 when a step ends within `launch`, else 2: the next step may be
    launched before the tokens of this one are known (SequenceStep.previous). num_ranks: those of
    its tensor-parallel group. token_s: what a token takes in a short step on a CPU, by the warm-up;
    0 on GPUs, whose steps are all short. step_rows: numbers of rows, ascending, that steps with
    prompt tokens are rounded up to, so that one launch starts them; larger ones take longer to
    launch.
    """

    def __init__(
        self,
        runner: RankRunner | CudaRunner,
        fingerprint: KVFingerprint,
        group: RankGroup | None = None,
    ) -> None:
        self._runner = runner
        self._closed = False
        self._group = group
        self.token_s = 0.0
        self.depth = runner.depth
        self.step_rows = runner.step_rows
        self.num_ranks = 1 if group is None else group.size
        self.layout = runner.layout
        self.fingerprint = fingerprint
        precision = weight_format(runner.config, runner.model_config) or runner.config.dtype
        kv = runner.config.kv_dtype
        #: Of the weights, for users: how they are quantised, or their type; that of KV, if another.
        self.precision = precision if kv is None else f"{precision}, KV {kv}"
        self.vocab_size = runner.vocab_size
        self.max_model_len = runner.max_model_len
        self.pool = runner.pool

    def launch(self, batch: StepBatch) -> PendingStep:
        """Check a batch and start it on all ranks. Raises RankLost when a rank is gone."""
        step: Any = self._runner.prepare(batch)
        if self._group is not None:
            self._group.step(batch)
        return self._runner.submit(step)

    def run(self, batch: StepBatch) -> StepResult:
        return self.launch(batch).wait()

    def while_launching(self, function: Callable[[], None]) -> None:
        """Have `function` called between the layers of each step that takes milliseconds to launch,
        by the thread that launches it."""
        self._runner.meanwhile = function

    def use_threads(self, count: int) -> None:
        """Set the CPU threads of steps on rank 0."""
        self._runner.use_threads(count)

    def enter_thread(self) -> None:
        """Prepare thread-local state of libraries before this thread launches its first step."""
        self._runner.enter_thread()

    def warmup(self) -> None:
        """Run a step for every kernel that steps can need, in block 0, before requests come.

        Raises ModelRefused when the model's output is not finite in the dtype asked for.
        """
        times: list[float] = []
        for batch in self._runner.warmup_batches():
            began = time.monotonic()
            result = self.run(batch)
            times.append((time.monotonic() - began) / batch.num_tokens)
            self.token_s = min(times) if self.depth == 1 else 0.0
            if result.non_finite:
                raise ModelRefused(
                    f"dtype {self.fingerprint.dtype}: the model's output is not finite: weights or "
                    "activations overflow, or the weights are damaged",
                    param="dtype",
                )

    def progress(self) -> str:
        """Where each rank stands, for people; empty without followers."""
        return "" if self._group is None else f"; {self._group.progress()}"

    def close(self) -> None:
        """Leave the tensor group; the followers end with their RankGroup. Idempotent."""
        if not self._closed:
            self._closed = True
            self._runner.close()


def build_executor(
    config: EngineConfig, group: RankGroup | None = None, *, timeout_s: float = 600.0
) -> Executor:
    """Load rank 0, wait for the followers of `group` to have loaded, make the KV pools.

    Raises ModelRefused naming what cannot be served, and RankLost when a follower does not come or
    fails within `timeout_s`.
    """
    _check_size(config, 1 if group is None else group.size)
    if config.device.startswith("cuda"):
        _require_triton(config)
        # Imported here: an engine on a CPU needs no triton.
        from engine.cuda.build import build_rank_zero

        return Executor(*build_rank_zero(config, group, timeout_s=timeout_s), group)
    if group is None:
        runner = RankRunner(config, TensorParallel())
        runner.open(runner.choose_num_blocks())
        return Executor(runner, runner.fingerprint)
    group.accept(timeout_s)
    runner = RankRunner(config, group.tp)
    num_blocks = group.num_blocks(runner.choose_num_blocks(), timeout_s)
    runner.open(num_blocks)
    group.open(num_blocks)
    return Executor(runner, runner.fingerprint, group)


class FollowerExecutor:
    """A follower rank: its pool, and the loop that runs rank 0's steps."""

    def __init__(self, runner: RankRunner | CudaRunner, follower: Follower) -> None:
        self._runner = runner
        self._follower = follower
        self.pool = runner.pool

    def follow(self, handlers: Mapping[str, Handler]) -> None:
        """Run steps until rank 0 closes the group. Raises RankLost when rank 0 is gone."""
        self._follower.follow(self._runner, handlers)
        self._runner.close()


def build_follower(invite: RankInvite, rank: int, config: EngineConfig) -> FollowerExecutor:
    """Join the group, load this rank's share, make its KV pool of the size that rank 0 chose."""
    _check_size(config, invite.size)
    follower = Follower(invite, rank)
    try:
        runner = _open_follower(follower, config)
    except Exception as error:
        follower.broken(error)
        raise
    return FollowerExecutor(runner, follower)


def _open_follower(follower: Follower, config: EngineConfig) -> RankRunner | CudaRunner:
    if config.device.startswith("cuda"):
        _require_triton(config)
        from engine.cuda.build import load_follower

        return load_follower(follower, config)
    runner = RankRunner(config, follower.tp)
    follower.open(runner)
    return runner


def _require_triton(config: EngineConfig) -> None:
    if find_spec("triton") is None:
        raise ModelRefused(
            f"device {config.device!r} needs triton: pip install triton", param="device"
        )


def _check_size(config: EngineConfig, size: int) -> None:
    if config.tp_size != size:
        raise InvalidRequest(
            f"tp_size is {config.tp_size}, but the engine has {size} rank(s)", param="tp_size"
        )
