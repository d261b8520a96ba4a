"""One rank of an engine on a CPU: its model, its KV pool, and steps on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch import SequenceStep, StepBatch, StepResult
from engine.config import EngineConfig, Quantization
from engine.cpu.inputs import PreparedStep, StepLimits, prepare_step
from engine.kernels.base import Geometry
from engine.kernels.cpu.operations import CpuKernels
from engine.kernels.native import kernels as native
from engine.kernels.sampling import sample
from engine.kv.pool import KVPool
from engine.kv.sizing import context_length, kv_fingerprint, kv_layout, num_kv_blocks
from engine.model.checkpoint import Checkpoint
from engine.model.decoder import Decoder, ForwardOutput
from engine.model.families import load_model_config
from engine.model.matrices import matrix_reader
from engine.model.sharding import share_of
from engine.model.weights import WeightLoader
from engine.ranks.tensor_parallel import TensorParallel
from protocol.errors import Unsupported
from protocol.kv_layout import KVLayout
from protocol.sampling import SamplingParams, TokenLogprobs


class FinishedStep:
    """A step that ended before `submit` returned."""

    number = 0
    is_over = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class RankRunner:
    """Loads one rank's share of the model, then runs steps on it. All ranks get the same batches in
    the same order. `open` comes between: rank 0 decides the size of the KV pool."""

    depth = 1
    step_rows: tuple[int, ...] = ()
    layout: KVLayout
    pool: KVPool
    #: Never called: a step is over once it is launched.
    meanwhile: Callable[[], None] | None = None

    def __init__(self, config: EngineConfig, tp: TensorParallel) -> None:
        if config.device != "cpu":
            raise Unsupported(f"device {config.device!r} is not served here", param="device")
        model = load_model_config(config.model_path)
        share = share_of(model, tp.rank, tp.size)
        self.config = config
        self.model_config = model
        self.vocab_size = model.vocab_size
        self.max_model_len = context_length(config, model)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._device = torch.device(config.device)
        geometry = Geometry(
            num_q_heads=share.num_q_heads,
            num_kv_heads=share.num_kv_heads,
            head_dim=model.head_dim,
            block_size=config.block_size,
            scale=model.attention_scale,
            softcap=model.attention_softcap,
            dtype=self._dtype,
        )
        runs_native = native.serves(geometry) and len(set(model.kv_shapes)) == 1
        self.kernels = native.NativeKernels(geometry) if runs_native else CpuKernels(geometry)
        if config.num_threads is not None:
            self.kernels.use_threads(config.num_threads)
        with torch.inference_mode():
            source = Checkpoint(config.model_path, self._dtype, self._device)
            source.check(tied=model.tie_word_embeddings)
            self.fingerprint = kv_fingerprint(config, model, source, self.max_model_len)
            matrices = matrix_reader(
                source, model, config.quantization, self._dtype, _head(config.quantization)
            )
            loader = WeightLoader(model, share, source, self._device, matrices)
            self.model = Decoder(loader, self.kernels, tp, self.max_model_len)
            if tp.rank == 0 and model.quantization is None:  # other ranks read no biases of sums
                source.check_unused(tied=model.tie_word_embeddings)
        self._tp = tp

    def choose_num_blocks(self) -> int:
        return num_kv_blocks(self.config, self.model_config)

    def open(self, num_blocks: int) -> None:
        self.layout = kv_layout(self.config, self.model_config, num_blocks)
        self._limits = StepLimits(
            block_size=self.config.block_size,
            num_blocks=num_blocks,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            groups=self.layout.groups,
        )
        kind = getattr(torch, self.layout.dtype)
        self.pool = KVPool(self.layout, self._tp.rank, kind, self._device)

    def prepare(self, batch: StepBatch) -> PreparedStep:
        """Lay the batch out in rows; raises Internal when it is out of bounds."""
        return prepare_step(batch, self._limits)

    def submit(self, step: PreparedStep) -> FinishedStep:
        """Run one step; on ranks other than 0 every token is None."""
        with torch.inference_mode():
            result = run_prepared(self.model, self.pool.layers, step)
        return FinishedStep(result)

    def follow_step(self, batch: StepBatch) -> None:
        self.submit(self.prepare(batch))

    def use_threads(self, count: int) -> None:
        self.kernels.use_threads(count)

    def enter_thread(self) -> None:
        """Nothing to prepare: no library keeps state per thread."""

    def warmup_batches(self) -> list[StepBatch]:
        num_groups = len(self.layout.groups)
        return warmup_batches(self.config.block_size, self.max_model_len, num_groups)

    def close(self) -> None:
        self._tp.close()


def _head(quantization: str | None) -> Quantization | None:
    """What the output head becomes where matrices are quantised at load: of a small model it is a
    fifth of what a step reads, and 8 bits of it cost no quality that shows."""
    return Quantization.INT8 if quantization in (Quantization.INT8, Quantization.INT4) else None


def warmup_batches(block_size: int, max_model_len: int, num_groups: int = 1) -> list[StepBatch]:
    """A prompt of a few tokens and the decode after it, both in block 0."""
    tables = ((0,),) * num_groups
    tokens = max(1, min(8, block_size - 1, max_model_len - 1))
    sampling = SamplingParams(temperature=1.0)
    shapes = [((0,) * tokens, 0), ((0,), min(tokens, block_size - 1))]
    return [
        StepBatch(
            sequences=(
                SequenceStep(tokens=ids, start=start, block_tables=tables, sampling=sampling),
            )
        )
        for ids, start in shapes
    ]


def run_prepared(model: Decoder, kv: Sequence[Tensor], step: PreparedStep) -> StepResult:
    """Run a step on a model and sample; ranks other than 0 return an empty result."""
    tokens: list[int | None] = [None] * len(step.inputs.queries)
    logprobs: dict[int, TokenLogprobs] = {}
    scores: dict[int, tuple[TokenLogprobs, ...]] = {}
    output = model.forward(step.groups, kv)
    non_finite = _non_finite(output, step)
    if output.logits is not None:
        sampled, logprobs = _sample(output.logits, step)
        for index, token in zip(step.sampled, sampled, strict=True):
            tokens[index] = token
    if output.hidden is not None and step.scored is not None:
        states = output.hidden
        table = step.scored.table(lambda part: model.logits(states[part]), step.scored.targets)
        scores = {} if table is None else step.scored.read(table)
    return StepResult(
        tokens=tuple(tokens), logprobs=logprobs, target_logprobs=scores, non_finite=non_finite
    )


def _non_finite(output: ForwardOutput, step: PreparedStep) -> frozenset[int]:
    """Batch indices of sequences with infinities or NaN: in their logits, in hidden states that are
    scored, or, for chunks that sample nothing, in the input of the last layer."""
    found: list[int] = []
    if output.logits is not None and not _is_finite(output.logits):
        rows = output.logits.isfinite().all(-1).tolist()
        found += [index for index, finite in zip(step.sampled, rows, strict=True) if not finite]
    if not step.inputs.samples_all and not _is_finite(output.residual):
        parts = output.residual.split(step.inputs.queries)
        found += [i for i, part in zip(step.order, parts, strict=True) if not _is_finite(part)]
    if output.hidden is not None and step.scored is not None and not _is_finite(output.hidden):
        parts = output.hidden.split([size for _, size, _ in step.scored.parts])
        found += [
            index
            for (index, _, _), part in zip(step.scored.parts, parts, strict=True)
            if not _is_finite(part)
        ]
    return frozenset(found)


def _is_finite(x: Tensor) -> bool:
    """Whether all values are finite. Their sum in float32 is not if any is not; large finite values
    that only overflow the sum are looked at one by one."""
    return bool(x.sum(dtype=torch.float32).isfinite()) or bool(x.isfinite().all())


def _sample(logits: Tensor, step: PreparedStep) -> tuple[list[int], dict[int, TokenLogprobs]]:
    wanted = step.logprobs
    if wanted is None:
        return sample(logits, step.sampling).tolist(), {}
    raw = logits[wanted.rows]  # a copy: sampling may write to the logits
    tokens = sample(logits, step.sampling)
    table = wanted.table(lambda part: raw[part], tokens[wanted.rows])
    assert table is not None
    return tokens.tolist(), {index: entry for index, (entry,) in wanted.read(table).items()}
