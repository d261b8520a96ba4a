"""Which architectures are served, and the configuration of a model folder."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused
from engine.model.config import ModelConfig
from engine.model.families import (
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from engine.model.reading import refused

FAMILIES = {
    "LlamaForCausalLM": llama.parse,
    "MistralForCausalLM": mistral.parse,
    "Qwen2ForCausalLM": qwen2.parse,
    "Qwen3ForCausalLM": qwen3.parse,
    "Gemma2ForCausalLM": gemma2.parse,
    "Gemma3ForCausalLM": gemma3.parse,
    "Phi3ForCausalLM": phi3.parse,
    "SmolLM3ForCausalLM": smollm3.parse,
    "GraniteForCausalLM": granite.parse,
    "Olmo2ForCausalLM": olmo2.parse,
}


def load_model_config(model_path: str | Path) -> ModelConfig:
    """Parse `model_path`/config.json. Raises ModelRefused naming the file or field."""
    path = Path(model_path) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelRefused(f"{path} does not exist", param=str(path)) from error
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}", param=str(path)) from error
    if not isinstance(raw, dict):
        raise ModelRefused(f"{path} is not a JSON object", param=str(path))
    return parse_model_config(raw)


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Parse a config.json object. Raises ModelRefused naming the field that is not served."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in FAMILIES:
        nearest = difflib.get_close_matches(str(name), FAMILIES, n=1, cutoff=0.0)[0]
        raise refused(
            "architectures",
            f"{names} is not served; nearest is {nearest} (served: {', '.join(FAMILIES)})",
        )
    if raw.get("quantization_config"):
        raise refused("quantization_config", "quantised weights are not served")
    return FAMILIES[name](raw)
