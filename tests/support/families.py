"""Tiny random models of every family, made by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Odd sizes, three or four layers, windows shorter than the prompts of the tests.
COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",  # the others leave out softcaps
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    "original_max_position_embeddings": 64,
}
#: Name of a case: (transformers' class of configuration, what differs from COMMON).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 24}),
    "mistral-window": ("MistralConfig", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi3": ("Phi3Config", {"sliding_window": 17}),
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "phi4-mini": (
        "Phi3Config",
        {
            "head_dim": 16,
            "rope_parameters": LONGROPE
            | {
                "partial_rotary_factor": 0.75,
                "short_factor": LONGROPE["short_factor"][:6],
                "long_factor": LONGROPE["long_factor"][:6],
            },
            "original_max_position_embeddings": 64,
        },
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "sliding_window": 10,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention"),
                *("sliding_attention", "full_attention"),
            ],
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 10,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
}


def save_family(case: str, folder: Path, *, seed: int = 0, **overrides: Any) -> str:
    """Write the random model of a case, `overrides` applied; return the path. Biases and norms get
    values, too."""
    import transformers  # seconds, for those who need it

    name, changes = CASES[case]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**(COMMON | changes | overrides))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, tensor in tensors.items():
        if key.endswith(("bias", "layer_scalar")) or "norm" in key:
            tensor.add_(torch.randn(tensor.shape) * 0.2)
    save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


def redress_smollm2(source: Path, folder: Path, family: str) -> Path:
    """SmolLM2's real weights as another family's checkpoint that computes the same; as Gemma 2's,
    which has norms and a gate of its own, something else."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    layers = range(config["num_hidden_layers"])
    attention = [f"model.layers.{i}.self_attn." for i in layers]
    match family:
        case "Mistral":
            config["sliding_window"] = config["max_position_embeddings"]
        case "Qwen2":
            for prefix in attention:
                for name in "qkv":
                    rows = tensors[f"{prefix}{name}_proj.weight"].shape[0]
                    tensors[f"{prefix}{name}_proj.bias"] = torch.zeros(rows)
        case "Phi3":
            for prefix in attention:
                parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in "qkv"]
                tensors[f"{prefix}qkv_proj.weight"] = torch.cat(parts)
            for prefix in (f"model.layers.{i}.mlp." for i in layers):
                parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]
                tensors[f"{prefix}gate_up_proj.weight"] = torch.cat(parts)
        case "Granite":
            config |= {"attention_multiplier": (config["hidden_size"] // 9) ** -0.5}
            config |= {"embedding_multiplier": 0.5, "residual_multiplier": 0.5}
            # Halving the whole residual stream changes nothing behind its norms.
        case "Gemma2":
            config |= _GEMMA2 | {"model_type": "gemma2", "tie_word_embeddings": False}
            _norms_of_gemma2(tensors, len(layers))
            embedding = tensors["model.embed_tokens.weight"]
            tensors["lm_head.weight"] = embedding.clone()
            embedding /= config["hidden_size"] ** 0.5
    config["architectures"] = [f"{family}ForCausalLM"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    return folder


_GEMMA2 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "head_dim": 64,
    "sliding_window": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 30.0,
}


def _norms_of_gemma2(tensors: dict[str, torch.Tensor], num_layers: int) -> None:
    """Norms before attention and MLP less one, and norms behind both that halve."""
    for prefix in (f"model.layers.{i}." for i in range(num_layers)):
        before = tensors.pop(f"{prefix}post_attention_layernorm.weight")
        tensors[f"{prefix}pre_feedforward_layernorm.weight"] = before - 1
        tensors[f"{prefix}input_layernorm.weight"] -= 1
        for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.full_like(before, -0.5)
    tensors["model.norm.weight"] -= 1
