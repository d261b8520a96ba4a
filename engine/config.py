"""Settings of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.errors import InvalidRequest
from protocol.kv_layout import DTYPE_BYTES, FP8_KV


class Quantization(StrEnum):
    """What the matrices of an unquantised checkpoint become at load."""

    FP8 = "fp8"  # e4m3, a scale per output
    INT8 = "int8"  # a scale per output
    INT4 = "int4"  # a scale and a zero point per output and group of inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Model, arithmetic and KV memory of one engine.

    model_path: folder with config.json and *.safetensors.
    dtype: of activations, of weights that are not quantised, and of KV unless `kv_dtype` is set.
    kv_dtype: `fp8` keeps KV as e4m3 codes, half as many bytes; None: as `dtype`.
    quantization: what the weights of an unquantised checkpoint become at load, `fp8`, `int8` or
        `int4`; None leaves them as the checkpoint has them.
    kv_family: a name that engines share whose KV may meet although their weights differ: other
        precisions of the same model. Empty: KV meets between equal weights only.
    device: `cpu` or `cuda`.
    block_size: tokens per KV block; the two pools of a cluster may differ in it.
    num_blocks, kv_memory_bytes: size of the pool, in blocks (each of one KV group) or in bytes per
        rank; by default it follows from the free memory.
    spare_bytes: memory of each GPU left free by a pool sized from free memory; workers leave what
        their links need.
    max_model_len: longest sequence, prompt plus output; None takes the model's own limit.
    tp_size: tensor-parallel ranks, one process each.
    num_threads: threads of CPU kernels. None: the workers of a machine that have work share its
        cores, step by step; tensor-parallel ranks take torch's default.
    max_step_tokens, max_running: prompt tokens and sequences of the largest step: a CUDA engine
        reserves memory for it; workers have their own schedulers.
    """

    model_path: str
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    quantization: str | None = None
    kv_family: str = ""
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
        if not self.model_path:
            raise InvalidRequest("model_path is empty", param="model_path")
        dtypes = [name for name in DTYPE_BYTES if name != FP8_KV]
        if self.dtype not in dtypes:
            known = ", ".join(dtypes)
            raise InvalidRequest(f"dtype {self.dtype!r} is not one of {known}", param="dtype")
        if self.kv_dtype not in (None, "fp8"):
            raise InvalidRequest(f"kv_dtype {self.kv_dtype!r} is not fp8", param="kv_dtype")
        if self.quantization is not None and self.quantization not in list(Quantization):
            known = ", ".join(Quantization)
            raise InvalidRequest(
                f"quantization {self.quantization!r} is not one of {known}", param="quantization"
            )
        if self.spare_bytes < 0:
            raise InvalidRequest("spare_bytes is negative", param="spare_bytes")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {value}", param=name)

    @property
    def kv_type(self) -> str:
        """The type of KV in layouts and fingerprints."""
        return FP8_KV if self.kv_dtype == "fp8" else self.dtype


_AT_LEAST_ONE = (
    *("block_size", "tp_size", "max_step_tokens", "max_running"),
    *("num_blocks", "kv_memory_bytes", "max_model_len", "num_threads"),
)
