"""Shapes of real models, as their config.json states them: what speed depends on."""

from __future__ import annotations

from typing import Any

from protocol.kv_layout import KVLayout

#: A block table for each KV group.
Tables = tuple[tuple[int, ...], ...]

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
    }


def _model(
    family: str, hidden: int, mlp: int, layers: int, heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        **more,
    }


def block_tables(tables: Tables, layout: KVLayout, start: int) -> Tables:
    """A step's tables at position `start`, from those of whole sequences."""
    return tuple(
        table[group.first_token(start) // layout.block_size :] if group.window else table
        for group, table in zip(layout.groups, tables, strict=True)
    )


def kv_tokens(windows: list[int | None], context: int) -> int:
    """Tokens that a decode row sees, over all layers."""
    return sum(context if window is None else min(context, window) for window in windows)


def visible_pairs(window: int | None, length: int) -> float:
    """Pairs of a query and a key that it sees, in a prompt of so many tokens."""
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2


_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
_QWEN3_8B = _model(
    "Qwen3", 4096, 12288, 36, 32, 151936,
    head_dim=128, max_position_embeddings=40960, rope_theta=1e6,
)  # fmt: skip

MODELS = {
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-8b-yarn": _QWEN3_8B | {"max_position_embeddings": 131072, "rope_scaling": _YARN},
    "mistral-7b": _model(
        "Mistral", 4096, 14336, 32, 32, 32768, max_position_embeddings=32768, rope_theta=1e6
    ),
    "gemma-3-12b": _model(
        "Gemma3",
        3840,
        15360,
        48,
        16,
        262208,
        head_dim=256,
        sliding_window=1024,
        query_pre_attn_scalar=256,
        max_position_embeddings=131072,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi-4-mini": _model(
        "Phi3",
        3072,
        8192,
        32,
        24,
        200064,
        max_position_embeddings=131072,
        rope_theta=1e4,
        tie_word_embeddings=True,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=4096,
        sliding_window=262144,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + i / 8 for i in range(48)],
        },
    ),
    "tiny": _llama(512, 1024, 2, 8) | {"vocab_size": 4096, "max_position_embeddings": 4096},
}
