"""The bytes of every token, for llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from llguidance import LLTokenizer


def load_vocabulary(folder: Path, vocab_size: int) -> LLTokenizer | None:
    """The vocabulary of the model in `folder`, padded to `vocab_size`; None without tokenizer.json.

    Takes about half a second for 128,000 tokens and holds the GIL: call it before serving. The
    tokens that end an output are given to Matcher.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["truncation"] = tokenizer["padding"] = None
    # A fine-tuned model may have added tokens, such as padding, without rows in its weights.
    added = [token for token in tokenizer["added_tokens"] if token["id"] < vocab_size]
    tokenizer["added_tokens"] = added
    first = min((token["id"] for token in added if token["special"]), default=0)
    return LLTokenizer(json.dumps(tokenizer), n_vocab=vocab_size, eos_token=first)


def byte_vocabulary(special: Mapping[int, str]) -> LLTokenizer:
    """A vocabulary of the 256 bytes and a model's special tokens under their own ids.

    Enough to check that a grammar compiles, without the memory of the real vocabulary.
    """
    return LLTokenizer(_Bytes(special))  # type: ignore[arg-type]


class _Bytes:
    """The attributes that LLTokenizer reads of a tokenizer object."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, special: Mapping[int, str]) -> None:
        ordinary = [i for i in range(max(special, default=0) + 257) if i not in special][:256]
        size = max([*ordinary, *special]) + 1
        self.tokens = [b""] * size
        self._id_of_byte = dict(enumerate(ordinary))
        for byte, token in self._id_of_byte.items():
            self.tokens[token] = bytes([byte])
        for token, text in special.items():
            self.tokens[token] = text.encode()
        self.special_token_ids = sorted(special)
        self.eos_token_id = min(special, default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self._id_of_byte[byte] for byte in raw]
