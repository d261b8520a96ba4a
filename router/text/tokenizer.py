"""A model's text side, read from its folder: tokenizer, chat template, end tokens.

Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, config.json,
generation_config.json and chat templates as transformers writes them; nothing of transformers or
torch is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from protocol.errors import ContextTooLong
from protocol.sampling import usable_defaults
from router.request.chat_messages import PLAIN, AnyMessage, TemplateOptions
from router.text.chat_template import load_templates, token_text
from router.text.control_tokens import ControlTokens, HiddenControlTokens
from router.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    TokenTable,
    WindowDetokenizer,
    byte_table,
)
from router.text.reasoning import Reasoning, ReasoningFormat, detect_reasoning

#: Of a text with more characters per allowed token than this, the start is tokenised first.
_CHARS_PER_TOKEN = 8
#: Cutting a text can change the tokens around the cut by no more than this.
_CUT_EFFECT = 64
#: What git-lfs leaves in place of a file that was not fetched is smaller.
_POINTER_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """The text of a prompt; offsets[i] is where that of token i begins, in characters."""

    text: str
    offsets: tuple[int, ...]


class ModelText:
    """Text to ids and back for one model. Thread-safe once made; encoding releases the GIL.

    vocab_size: ids the model can be given. max_position: its context in tokens, None if not stated.
    special_tokens: the spelling of special tokens by id. added_tokens: of these and all others that
    the tokenizer takes whole. chat: its chat templates, from the file `chat_template` if that is
    set. eos_ids: every id that ends an output, of tokenizer_config.json, config.json and
    generation_config.json together, because each alone is wrong for some model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        neutralise_control_tokens: bool = True,
        chat_template: str = "",
        tool_format: str = "",
        reasoning_format: str = "",
    ) -> None:
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        model = _read_json(folder / "config.json", required=True)
        settings = _tokenizer_settings(folder)
        generation = _read_json(folder / "generation_config.json")
        text_model = model.get("text_config") or model
        self.vocab_size = int(text_model.get("vocab_size") or self._tokenizer.get_vocab_size())
        context = text_model.get("max_position_embeddings")
        self.max_position = None if context is None else int(context)
        #: Values of generation_config.json for requests that leave them out.
        self.sampling_defaults = usable_defaults(generation)
        self.eos_ids = self._end_tokens(settings, text_model, generation)
        decoder = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {i: token.content for i, token in decoder.items() if token.special}
        self.added_tokens = {i: token.content for i, token in decoder.items()}
        self._control = ControlTokens(self._tokenizer) if neutralise_control_tokens else None
        self.chat = load_templates(folder, settings, chosen=chat_template, tool_format=tool_format)
        self.reasoning = self._reasoning(reasoning_format)
        self._byte_table = self._make_byte_table()
        self._whole_table = self._byte_table and [
            self.special_tokens[i].encode() if i in self.special_tokens else data
            for i, data in enumerate(self._byte_table)
        ]
        #: Every id by itself, as text and bytes.
        self.token_table = TokenTable(self._tokenizer, self._byte_table)

    def _reasoning(self, chosen: str) -> Reasoning:
        template = self.chat.plain
        if chosen or template is None:
            found = ReasoningFormat(chosen or ReasoningFormat.NONE)
        else:
            found = detect_reasoning(template.source)
        ids = {token: i for i, token in self.added_tokens.items()}
        return Reasoning(found, {mark: ids[mark] for mark in found.marks if mark in ids})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a text; by default with what the tokenizer adds (often a BOS)."""
        # Only the batch calls release the GIL; this one computes no offsets.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(batch[0].ids)

    def encode_chat(
        self,
        messages: Sequence[AnyMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = PLAIN,
        *,
        add_special_tokens: bool = False,
        limit: int | None = None,
    ) -> tuple[int, ...]:
        """The ids of a chat. The template writes the special tokens, so none are added on top.

        Raises InvalidRequest when the model has no template or the template refuses the messages,
        ContextTooLong when the prompt has far more than `limit` tokens.
        """
        hidden = None if self._control is None else HiddenControlTokens(self._control)
        hide = (lambda text, _role: text) if hidden is None else hidden.hide
        prompt = self.chat.render(messages, tools, hide, options)
        if limit is not None and self.longer_than(prompt, limit):
            raise ContextTooLong(
                f"the chat has {len(prompt)} characters, which are more than {limit} tokens",
                param="messages",
            )
        if hidden is None or not hidden.used:
            return self.encode(prompt, add_special_tokens=add_special_tokens)
        return hidden.encode(prompt, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()
    ) -> Detokenizer:
        """A fresh detokenizer of an output that follows `prompt`."""
        table = self._byte_table if skip_special_tokens else self._whole_table
        if table is not None:
            return ByteDetokenizer(table, prompt=prompt)
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        return WindowDetokenizer(decode, prompt=prompt, table=self.token_table)

    def show(
        self, prompt: str | Sequence[int], ids: Sequence[int], *, skip_special_tokens: bool
    ) -> PromptText:
        """The text of a prompt: as it came, or decoded if it came as ids."""
        if isinstance(prompt, str):
            places = self._tokenizer.encode_batch([prompt])[0].offsets
            return PromptText(text=prompt, offsets=tuple(start for start, _ in places))
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        text, offsets = "", []
        for token in ids:
            before = len(text)
            text += detokenizer.push(token)
            offsets.append(self.token_table[token].begins(before, len(text)))
        return PromptText(text=text + detokenizer.flush(), offsets=tuple(offsets))

    def longer_than(self, text: str, limit: int) -> bool:
        """Whether a text surely has more than `limit` tokens: the cost is bounded, because of a
        long one only as much is tokenised as it takes, in slices. False does not mean that it
        fits."""
        size = max(limit, _CUT_EFFECT) * _CHARS_PER_TOKEN
        if len(text) <= size:
            return False
        for start in range(0, len(text), size):
            limit -= len(self.encode(text[start : start + size], add_special_tokens=False))
            limit += _CUT_EFFECT
            if limit < 0:
                return True
        return False

    def _end_tokens(
        self, settings: dict[str, Any], model: dict[str, Any], generation: dict[str, Any]
    ) -> tuple[int, ...]:
        ids = set(_ids(model.get("eos_token_id"))) | set(_ids(generation.get("eos_token_id")))
        token = token_text(settings.get("eos_token"))
        if token is not None:
            ids |= set(_ids(self._tokenizer.token_to_id(token)))
        return tuple(sorted(i for i in ids if 0 <= i < self.vocab_size))

    def _make_byte_table(self) -> list[bytes] | None:
        decoder = self._tokenizer.decoder
        if decoder is None or self._tokenizer.normalizer is not None:
            return None
        # Its state alone: that of a whole tokenizer takes a second for a large vocabulary.
        if not _is_byte_level(json.loads(decoder.__getstate__())):
            return None
        added = self._tokenizer.get_added_tokens_decoder()
        if any(token.lstrip or token.rstrip for token in added.values()):
            return None
        vocab = self._tokenizer.get_vocab()
        tokens: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for token, i in vocab.items():
            tokens[i] = None if i in self.special_tokens else token
        return byte_table(tokens)


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # what the library raises has no type of its own
        hint = " (a pointer of git-lfs?)" if path.stat().st_size < _POINTER_BYTES else ""
        raise ValueError(f"{path} cannot be read: {error}{hint}") from error
    tokenizer.no_truncation()  # some files carry the training setting
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise FileNotFoundError(f"{path} is missing")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object")
    return content


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; older folders name the special tokens in a file of their own, which
    counts where the first does not list the added tokens (as in transformers 5)."""
    settings = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    return settings | _read_json(folder / "special_tokens_map.json")


def _ids(value: object) -> Iterator[int]:
    values = value if isinstance(value, list) else [value]
    yield from (i for i in values if isinstance(i, int))


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"
