"""Tiny random Llama checkpoints, made by transformers, and what transformers answers on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def save_tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> str:
    """Write a random model with wide weights (so that its answers vary); return the path."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, for those who need it

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    settings.update(overrides)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.save_pretrained(folder)
    return str(folder)


#: Between a token's logit and the next one's: several times what float32 may differ.
LEAD = 3e-5


class Oracle:
    """transformers in float32: greedy continuations of a checkpoint."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Exactly `num_tokens` greedy tokens, ends of sequence ignored. AssertionError for a prompt
        after which two are about as likely: sums in another order may choose the other."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best, next_best = torch.cat(out.logits).topk(2).values.unbind(-1)
        assert float((best - next_best).min()) > LEAD, "choose another prompt"
        return [int(token) for token in out.sequences[0, len(prompt) :]]

    def greedy_among(
        self, prompt: Sequence[int], allowed: Sequence[int], num_tokens: int
    ) -> list[int]:
        """The same among some tokens."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            with torch.inference_mode():
                logits = self._model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(max(allowed, key=lambda token: float(logits[token])))
        return tokens[len(prompt) :]
