"""How one engine is set up."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import InvalidRequest
from protocol.kv_layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: a model, how it is computed and how much KV it may hold.

    model_path: folder with config.json and *.safetensors.
    dtype: of weights, activations and KV.
    device: `cpu` or `cuda`.
    block_size: tokens per KV block; the two pools of a cluster may differ in it.
    num_blocks, kv_memory_bytes: size of the pool, in blocks or in bytes of each rank; with neither
        it follows from the memory that is free.
    spare_bytes: memory of each GPU that is left to others when the pool is sized from what is free;
        workers leave what their links need.
    max_model_len: longest sequence, prompt plus output; None takes the model's own limit.
    tp_size: tensor-parallel ranks, one process each.
    num_threads: threads of CPU kernels. With None, the workers of
        a machine that have work share its cores, step by step; tensor-parallel ranks and
        `engine.local` then take torch's own number.
    max_step_tokens: prompt tokens of the largest step: a CUDA engine makes room for it, and
        `engine.local` plans up to it (workers have their own schedulers).
    max_running: sequences of the largest step, likewise.
    """

    model_path: str
    dtype: str = "bfloat16"
    device: str = "cpu"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    spare_bytes: int = 0
    max_model_len: int | None = None
    tp_size: int = 1
    num_threads: int | None = None
    max_step_tokens: int = 512
    max_running: int = 64

    def __post_init__(self) -> None:
        """Raise InvalidRequest naming the first field that is out of range."""
        if not self.model_path:
            raise InvalidRequest("model_path is empty", param="model_path")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise InvalidRequest(f"dtype {self.dtype!r} is not one of {known}", param="dtype")
        for name in ("block_size", "tp_size", "max_step_tokens", "max_running"):
            _at_least_one(name, getattr(self, name))
        if self.spare_bytes < 0:
            raise InvalidRequest("spare_bytes is negative", param="spare_bytes")
        for name in ("num_blocks", "kv_memory_bytes", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None:
                _at_least_one(name, value)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise InvalidRequest(f"{name} must be at least 1, got {value}", param=name)
