"""Which models the CUDA engine computes."""

from __future__ import annotations

from engine.errors import ModelRefused
from engine.kernels.activation import Activation
from engine.model.config import ModelConfig, NormPlacement, QkNorm


def check_served(model: ModelConfig, max_model_len: int) -> None:
    """Raise ModelRefused naming what this model has that the CUDA engine does not compute."""
    lacking = {
        "windows shorter than max_model_len": model.windowed(max_model_len),
        "norms after attention and MLP": model.norms is not NormPlacement.BEFORE,
        "norms of queries and keys over all heads": model.qk_norm is QkNorm.ALL,
        "an offset of norm weights": model.norm_offset != 0.0,
        "attention softcaps": model.attention_softcap is not None,
        "logit softcaps": model.final_softcap is not None,
        "a gate other than SiLU": model.activation is not Activation.SILU,
    }
    missing = [what for what, present in lacking.items() if present]
    if missing:
        raise ModelRefused(
            f"{model.architecture}: not served on GPUs yet: {', '.join(missing)}",
            param="architectures",
        )
