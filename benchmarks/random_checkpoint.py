"""A model folder of a real shape with random weights, for machines without the real ones.

    python -m benchmarks.random_checkpoint llama-3.1-8b /dev/shm/llama-3.1-8b

Everything a served model has: safetensors shards with their index, config, tokenizer (byte-level;
every id of the vocabulary is text), chat template and end tokens. Made on the GPU where there is
one; several shards are written at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.random_weights import RandomSource
from benchmarks.shapes import MODELS
from engine.model.config import ModelConfig
from engine.model.families import parse_model_config

_WRITERS = 8
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPACE = "\u0120"  # a space in the alphabet of byte-level tokenizers
_BOS, _EOS, _HEAD, _TAIL = "<|begin|>", "<|end|>", "<|head|>", "<|tail|>"
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|head|>' + message['role'] + '<|tail|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>' }}{% endif %}"
)

Shape = tuple[int, ...]


def write_checkpoint(shape: dict[str, Any], folder: Path, *, seed: int = 0) -> int:
    """Write the whole folder; bytes of its weights, which are bfloat16."""
    config = parse_model_config(shape)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(config.vocab_size, folder)
    end = config.vocab_size - 3
    described = shape | {"model_type": "llama", "torch_dtype": "bfloat16"}
    _dump(folder / "config.json", described | {"bos_token_id": end - 1, "eos_token_id": end})
    _dump(folder / "generation_config.json", {"eos_token_id": [end], "temperature": 1.0})
    return write_weights(config, folder, seed=seed)


def write_weights(config: ModelConfig, folder: Path, *, seed: int = 0) -> int:
    """One shard a layer and one for the rest, with the index; bytes of all tensors."""
    shards = list(shards_of(config))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(_WRITERS) as pool:
        numbers = itertools.count(seed)
        sizes = list(
            pool.map(_write_shard, shards, (folder / name for name in names), numbers),
        )
    owners = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": owners}
    _dump(folder / "model.safetensors.index.json", index)
    return sum(sizes)


def shards_of(config: ModelConfig) -> Iterator[dict[str, Shape]]:
    """Names and shapes of the tensors of each shard."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (q, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, q),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.gate_proj.weight": (mlp, hidden),
            f"{prefix}mlp.up_proj.weight": (mlp, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, mlp),
        }
    table = (config.vocab_size, hidden)
    head = {} if config.tie_word_embeddings else {"lm_head.weight": table}
    yield {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)} | head


def _write_shard(shapes: dict[str, Shape], path: Path, seed: int) -> int:
    """One file (https://huggingface.co/docs/safetensors), tensor by tensor; bytes of them all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = RandomSource(torch.bfloat16, device, seed)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            tensor = source.read(name, shape).view(torch.uint8).cpu().flatten()
            data = memoryview(tensor.numpy().data)
            while data:  # one call writes at most 2 GiB
                data = data[file.write(data) :]
    return end


def write_text(vocab_size: int, folder: Path) -> None:
    """Tokenizer, its settings and a chat template, for exactly `vocab_size` ids."""
    special = [_BOS, _EOS, _HEAD, _TAIL]
    special = [f"<|reserved_{i}|>" for i in range(min(252, vocab_size // 8))] + special
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(_words(), vocab_size - len(special) - len(alphabet)))
    tokens = [*alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": _BOS, "eos_token": _EOS, "chat_template": _TEMPLATE}
    _dump(folder / "tokenizer_config.json", settings)


def _words() -> Iterator[tuple[str, str]]:
    """Merges that make a space and letters into words, the shorter words first."""
    known = [_SPACE]
    while True:
        longer = [(word, letter) for word in known for letter in _LETTERS]
        yield from longer
        known = [word + letter for word, letter in longer]


def _dump(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a folder and say how long it took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_checkpoint")
    parser.add_argument("shape", choices=sorted(MODELS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    size = write_checkpoint(MODELS[options.shape], options.folder, seed=options.seed)
    seconds = time.perf_counter() - began
    sys.stdout.write(f"{options.folder}: {size / 1e9:.1f} GB in {seconds:.1f} s\n")


if __name__ == "__main__":
    main()
