"""The real small model, where it is installed, and checks against transformers on its weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def model_folder() -> Path | None:
    """Where SmolLM2-135M-Instruct is: BATON_TEST_MODEL, or the folder of `baton models get`."""
    named = os.environ.get("BATON_TEST_MODEL")
    home = Path(os.environ.get("BATON_HOME", "~/.cache/baton")).expanduser()
    folder = Path(named) if named else home / "models" / "smollm2-135m"
    return folder if (folder / "config.json").exists() else None


def first_layers(source: Path, folder: Path, count: int) -> Path:
    """The model cut off after `count` layers, in `folder`."""
    return some_layers(source, folder, range(count))


def some_layers(source: Path, folder: Path, layers: Sequence[int]) -> Path:
    """A model of these layers, in `folder`."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": len(layers)}))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        before, layer, after = name.partition(".layers.")
        number, dot, after = after.partition(".")
        if not layer:
            tensors[name] = tensor
        elif int(number) in layers:
            tensors[f"{before}{layer}{layers.index(int(number))}{dot}{after}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


ABSENT = "SmolLM2-135M-Instruct is not here: `baton models get smollm2-135m` fetches it"


class TeacherForced:
    """transformers in float32. One pass over prompt + output shows whether each output token is
    the highest logit of its position: by induction, that the output is the greedy one."""

    def __init__(self, path: Path, attention: str = "sdpa") -> None:
        """`attention`: transformers' implementation; `eager` has softcaps."""
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=attention
        )

    def differences(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> dict[tuple[int, int], str]:
        """Where an output is not the greedy one, by number and length of the prompt; on two
        cores."""
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(self.first_difference, prompts, outputs))
        return {
            (number, len(prompt)): difference
            for number, (prompt, difference) in enumerate(zip(prompts, found, strict=True))
            if difference is not None
        }

    def first_difference(self, prompt: Sequence[int], output: Sequence[int]) -> str | None:
        """None when `output` is greedy; otherwise where it is not, and by what margin."""
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *output[:-1]]])
            logits = self._model(ids, logits_to_keep=len(output)).logits[0]
        for index, token in enumerate(output):
            best = int(logits[index].argmax())
            if best != token:
                margin = float(logits[index, best] - logits[index, token])
                return f"token {index}: {token} instead of {best}, {margin:.2e} below it"
        return None
