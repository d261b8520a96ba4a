"""Turn a GGUF file into a plain model folder, once, with transformers. Not used while serving.

Weights are stored in float32: a 4-bit weight is d * q + m with d and m in half precision, a product
that needs more mantissa bits than bfloat16 or float16 have (only 3 to 30 % of SmolLM2's dequantised
values survive bfloat16 unchanged). So the folder holds exactly what the GGUF means, and a narrower
serving dtype is one rounding, made at load time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from cluster.models.sources import progress
from protocol.errors import Unavailable


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into the folder `target`.

    Raises Unavailable when the packages of the extra `models` are missing.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.stderr.write(f"converting {gguf.name} (once)\n")
    try:
        import accelerate  # noqa: F401  (transformers reads GGUF through both)
        import gguf as _gguf  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise Unavailable(
            f"conversion needs {error.name}: pip install accelerate gguf transformers",
            param="model",
        ) from error
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    tokenizer.save_pretrained(str(target))
    _write_json(target / "config.json", _plain_config(model.config.to_diff_dict()))
    generation = model.generation_config.to_diff_dict()
    _write_json(target / "generation_config.json", _plain_config(generation))
    _save_weights(model, target / "model.safetensors")


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config without what only described the GGUF file."""
    dropped = {"quantization_config", "_name_or_path", "_model_name_or_path"}
    kept = {key: value for key, value in config.items() if key not in dropped}
    if kept.get("model_type") == "llama":
        kept["architectures"] = ["LlamaForCausalLM"]
    return kept


def _save_weights(model: Any, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tied = bool(model.config.tie_word_embeddings)
    names = [n for n in model.state_dict() if not (tied and n == "lm_head.weight")]
    tensors = {}
    total = sum(model.state_dict()[name].nbytes for name in names)
    with progress(f"writing {path.name}", total) as bar:
        for name in names:
            tensors[name] = model.state_dict()[name].detach().float().contiguous()
            bar.update(tensors[name].nbytes // 2)
        try:
            save_file(tensors, str(path), metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, too
            raise Unavailable(f"cannot write {path}: {error}", param="model") from error
    path.chmod(0o644)  # safetensors creates it readable by its owner only


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")
