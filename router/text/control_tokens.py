"""Role markers inside chat content are text, not control.

A user who writes `<|im_end|>` must not end the user message and forge another. A placeholder stands
for each control token's spelling while the template runs; then the prompt is tokenised around the
placeholders, and each spelling in two parts, so that it becomes ordinary tokens of the same text.
Prompts without such spellings are tokenised in one piece.

Special tokens are neutralised in all content, added tokens not flagged special (`<think>`) in that
of users and tools only: an assistant's message may mean them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence

from router.request.chat_messages import ChatRole

_Encode = Callable[[str], tuple[int, ...]]


class ControlTokens:
    """The spellings of one tokenizer's control tokens."""

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
