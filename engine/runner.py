"""One rank of an engine: its model, its KV pool, and how a step runs on them."""

from __future__ import annotations

import torch

from engine.batch import StepBatch, StepResult
from engine.config import EngineConfig
from engine.inputs import prepare_step
from engine.kernels.base import Geometry
from engine.kernels.cpu import CpuKernels
from engine.kv.pool import KVPool
from engine.loader import Checkpoint
from engine.model.config import ModelConfig
from engine.model.llama import LlamaModel
from engine.model.sharding import rank_heads, share_of
from engine.sizing import num_kv_blocks
from engine.tp import TensorParallel
from protocol.errors import Unsupported
from protocol.kv_layout import KVFingerprint, KVLayout


class RankRunner:
    """Loads one rank's share and runs steps on it. All ranks are given the same batches in order."""

    def __init__(self, config: EngineConfig, tp: TensorParallel) -> None:
        if config.device != "cpu":
            raise Unsupported(f"device {config.device!r} is not served here", param="device")
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model = ModelConfig.load(config.model_path)
        share = share_of(model, tp.rank, tp.size)
        self.config = config
        self.vocab_size = model.vocab_size
        self.max_model_len = min(
            config.max_model_len or model.max_position_embeddings, model.max_position_embeddings
        )
        dtype, device = getattr(torch, config.dtype), torch.device(config.device)
        self.kernels = CpuKernels(
            Geometry(
                num_q_heads=share.num_q_heads,
                num_kv_heads=share.num_kv_heads,
                head_dim=model.head_dim,
                block_size=config.block_size,
                scale=model.head_dim**-0.5,
                dtype=dtype,
                device=device,
            )
        )
        with torch.inference_mode(), Checkpoint(config.model_path, dtype, device) as source:
            self.fingerprint = _fingerprint(config, model, source.digest())
            self.model = LlamaModel(model, share, source, self.kernels, tp, self.max_model_len)
        num_blocks = tp.minimum(num_kv_blocks(config, model))
        self.layout = _layout(config, model, tp.size, num_blocks)
        self.pool = KVPool(self.layout, tp.rank, dtype, device)
        self._tp = tp

    def run(self, batch: StepBatch) -> StepResult:
        """Run one step; on ranks other than 0 every token is None."""
        step = prepare_step(
            batch,
            block_size=self.layout.block_size,
            num_blocks=self.layout.num_blocks,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
        )
        tokens: list[int | None] = [None] * len(batch.sequences)
        with torch.inference_mode():
            logits = self.model.forward(step.inputs, self.pool.layers)
            if logits is not None:
                sampled = self.kernels.sample(logits, step.sampling).tolist()
                for index, token in zip(step.sampled, sampled, strict=True):
                    tokens[index] = token
        return StepResult(tokens=tuple(tokens))

    def close(self) -> None:
        """Leave the tensor-parallel group."""
        self._tp.close()


def _layout(config: EngineConfig, model: ModelConfig, size: int, num_blocks: int) -> KVLayout:
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        num_blocks=num_blocks,
        dtype=config.dtype,
        rank_heads=rank_heads(model, size),
    )


def _fingerprint(config: EngineConfig, model: ModelConfig, digest: str) -> KVFingerprint:
    return KVFingerprint(
        model=model.describe(),
        weights=digest,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=config.dtype,
        rope=model.rope.describe(),
    )
