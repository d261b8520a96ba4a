"""A model's text side, read from its folder: tokenizer, chat template, end tokens.

Reads tokenizer.json, tokenizer_config.json, config.json, generation_config.json and
chat_template.jinja as transformers writes them; nothing of transformers or torch is needed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from protocol.errors import ContextTooLong
from router.request.chat_messages import AnyMessage, ChatRole
from router.text.chat_template import load_templates, token_text
from router.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    TokenTable,
    WindowDetokenizer,
    byte_table,
)

_Encode = Callable[[str], tuple[int, ...]]
#: Of a text with more characters per allowed token than this, the start is tokenised first.
_CHARS_PER_TOKEN = 8
#: Cutting a text can change the tokens around the cut by no more than this.
_CUT_EFFECT = 64


class ControlTokens:
    """The spellings of one tokenizer's control tokens, which are text inside chat content.

    A user who writes `<|im_end|>` must not end the user message and forge another. A placeholder
    stands for each control token's spelling while the template runs; then the prompt is tokenised
    around the placeholders, and each spelling in two parts, so that it becomes ordinary tokens of
    the same text. Prompts without such spellings are tokenised in one piece.

    Special tokens are neutralised in all content, added tokens not flagged special (`<think>`) in
    that of users and tools only: an assistant's message may mean them.
    """

    def __init__(self, *, special: Sequence[str], plain: Sequence[str], encode: _Encode) -> None:
        self.special = _pattern(special)
        self.all = _pattern([*special, *plain])
        self.encode = encode


class HiddenControlTokens:
    """Those found in one prompt. Placeholders are random, so content cannot contain them."""

    def __init__(self, tokens: ControlTokens) -> None:
        self._tokens = tokens
        self._nonce = ""
        self._found: list[str] = []

    @property
    def used(self) -> bool:
        return bool(self._found)

    def hide(self, content: str, role: ChatRole) -> str:
        """`content` with a placeholder for each control token it spells."""
        trusted = role in (ChatRole.SYSTEM, ChatRole.ASSISTANT)
        pattern = self._tokens.special if trusted else self._tokens.all
        if pattern is None or pattern.search(content) is None:
            return content
        self._nonce = self._nonce or secrets.token_hex(8)
        return pattern.sub(self._placeholder, content)

    def encode(self, prompt: str) -> tuple[int, ...]:
        ids: list[int] = []
        parts = re.split(f"\ue000{self._nonce}:([0-9]+)\ue001", prompt)
        for i, part in enumerate(parts):
            ids += self._spelled(self._found[int(part)]) if i % 2 else self._tokens.encode(part)
        return tuple(ids)

    def _placeholder(self, match: re.Match[str]) -> str:
        self._found.append(match.group())
        return f"\ue000{self._nonce}:{len(self._found) - 1}\ue001"

    def _spelled(self, token: str) -> list[int]:
        """The token's spelling as ordinary ids: cut where neither part is a control token."""
        known = self._tokens.all
        if len(token) < 2 or known is None:
            return []  # a single character cannot be spelled any other way
        for cut in range(1, len(token)):
            parts = token[:cut], token[cut:]
            if not any(known.search(part) for part in parts):
                return [i for part in parts for i in self._tokens.encode(part)]
        return []


def _pattern(tokens: Sequence[str]) -> re.Pattern[str] | None:
    ordered = sorted({token for token in tokens if token}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


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
    ) -> None:
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        model = _read_json(folder / "config.json", required=True)
        settings = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        text_model = model.get("text_config") or model
        self.vocab_size = int(text_model.get("vocab_size") or self._tokenizer.get_vocab_size())
        context = text_model.get("max_position_embeddings")
        self.max_position = None if context is None else int(context)
        self.eos_ids = self._end_tokens(settings, text_model, generation)
        decoder = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {i: token.content for i, token in decoder.items() if token.special}
        self.added_tokens = {i: token.content for i, token in decoder.items()}
        added = decoder.values()
        self._control = ControlTokens(
            special=[token.content for token in added if token.special],
            plain=[token.content for token in added if not token.special],
            encode=lambda text: self.encode(text, add_special_tokens=False),
        )
        self._neutralise = neutralise_control_tokens
        self.chat = load_templates(folder, settings, chosen=chat_template, tool_format=tool_format)
        self._byte_table = self._make_byte_table()
        self._whole_table = self._byte_table and [
            self.special_tokens[i].encode() if i in self.special_tokens else data
            for i, data in enumerate(self._byte_table)
        ]
        #: Every id by itself, as text and bytes.
        self.token_table = TokenTable(self._tokenizer, self._byte_table)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a text; by default with what the tokenizer adds (often a BOS)."""
        # Only the batch calls release the GIL; this one computes no offsets.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(batch[0].ids)

    def encode_chat(
        self,
        messages: Sequence[AnyMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_special_tokens: bool = False,
        limit: int | None = None,
    ) -> tuple[int, ...]:
        """The ids of a chat. The template writes the special tokens, so none are added on top.

        Raises InvalidRequest when the model has no template or the template refuses the messages,
        ContextTooLong when the prompt has far more than `limit` tokens.
        """
        hidden = HiddenControlTokens(self._control) if self._neutralise else None
        hide = (lambda text, _role: text) if hidden is None else hidden.hide
        prompt = self.chat.render(messages, tools, hide)
        if limit is not None and self.longer_than(prompt, limit):
            raise ContextTooLong(
                f"the chat has {len(prompt)} characters, which are more than {limit} tokens",
                param="messages",
            )
        if hidden is None or not hidden.used:
            return self.encode(prompt, add_special_tokens=add_special_tokens)
        return hidden.encode(prompt)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        table = self._byte_table if skip_special_tokens else self._whole_table
        if table is not None:
            return ByteDetokenizer(table)
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens))

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
        """Whether a text surely has more than `limit` tokens: the cost is bounded, because only the
        start of a long one is tokenised. False does not mean that it fits."""
        start = text[: limit * _CHARS_PER_TOKEN]
        if len(start) == len(text):
            return False
        return len(self.encode(start, add_special_tokens=False)) > limit + _CUT_EFFECT

    def _end_tokens(
        self, settings: dict[str, Any], model: dict[str, Any], generation: dict[str, Any]
    ) -> tuple[int, ...]:
        ids = set(_ids(model.get("eos_token_id"))) | set(_ids(generation.get("eos_token_id")))
        token = token_text(settings.get("eos_token"))
        if token is not None:
            ids |= set(_ids(self._tokenizer.token_to_id(token)))
        return tuple(sorted(i for i in ids if 0 <= i < self.vocab_size))

    def _make_byte_table(self) -> list[bytes] | None:
        spec = json.loads(self._tokenizer.to_str())
        if not _is_byte_level(spec.get("decoder")) or spec.get("normalizer") is not None:
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
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # some files carry the training setting
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise FileNotFoundError(f"{path} is missing")
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


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
