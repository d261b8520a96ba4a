"""What a model thinks before it answers, taken out of an output's text as that arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.text.call_input import held


class ReasoningFormat(StrEnum):
    """How a model marks its thoughts. THINK (Qwen, DeepSeek, GLM, SmolLM3 and most others), SEED,
    MISTRAL and COHERE: a pair of marks before the answer. HARMONY (gpt-oss): messages of channels;
    `analysis` holds thoughts. NONE: thoughts stay text."""

    THINK = "think"
    SEED = "seed"
    MISTRAL = "mistral"
    COHERE = "cohere"
    HARMONY = "harmony"
    NONE = "none"

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the format, which may be special tokens. The first two of a pair begin and
        end a thought."""
        return _MARKS[self]


_MARKS = {
    ReasoningFormat.THINK: ("<think>", "</think>"),
    ReasoningFormat.SEED: ("<seed:think>", "</seed:think>"),
    ReasoningFormat.MISTRAL: ("[THINK]", "[/THINK]"),
    ReasoningFormat.COHERE: ("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat.HARMONY: (
        *("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
    ReasoningFormat.NONE: (),
}
_PAIRS = tuple(f for f in ReasoningFormat if len(_MARKS[f]) == 2)


def detect_reasoning(template: str) -> ReasoningFormat:
    """The format that a chat template shows."""
    if "<|channel|>" in template and "<|message|>" in template:
        return ReasoningFormat.HARMONY
    found = (f for f in _PAIRS if any(mark in template for mark in f.marks))
    return next(found, ReasoningFormat.NONE)


class Thinking(StrEnum):
    """Where an output begins."""

    INSIDE = "inside"  # in a thought that the prompt has begun
    BEFORE = "before"  # the model may begin a thought
    AFTER = "after"  # the prompt has ended the thought


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A model's format, and the ids of its marks that are single tokens."""

    format: ReasoningFormat
    mark_ids: dict[str, int]

    def thinking(
        self,
        prompt: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        *,
        continues: bool = False,
    ) -> Thinking:
        """How a prompt ends: only its last tokens count, unless it `continues` a message, which may
        have left a thought open."""
        if self.format not in _PAIRS:
            return Thinking.BEFORE
        begin, end = self.format.marks
        tail = decode(prompt[-_TAIL:]).rstrip()
        if tail.endswith(begin):
            return Thinking.INSIDE
        if tail.endswith(end):
            return Thinking.AFTER
        if not continues:
            return Thinking.BEFORE
        opened, closed = (self._last(mark, prompt) for mark in (begin, end))
        return Thinking.INSIDE if opened > closed else Thinking.BEFORE

    def _last(self, mark: str, prompt: Sequence[int]) -> int:
        """The place of a mark's last token; -1 when there is none."""
        token = self.mark_ids.get(mark)
        if token is None or token not in prompt:
            return -1
        return len(prompt) - 1 - list(reversed(prompt)).index(token)

    def splitter(self, thinking: Thinking) -> Splitter:
        if self.format is ReasoningFormat.HARMONY:
            return ChannelSplitter()
        begin, end = self.format.marks
        return PairSplitter(begin, end, thinking)


#: Tokens at the end of a prompt that are looked at as text.
_TAIL = 16


class PairSplitter:
    """Splits off a thought between two marks, with the line breaks around it."""

    def __init__(self, begin: str, end: str, thinking: Thinking) -> None:
        self._begin, self._end = begin, end
        self._buffer = ""
        self._step = {
            Thinking.BEFORE: self._start,
            Thinking.INSIDE: self._think,
            Thinking.AFTER: self._answer,
        }[thinking]
        self._thought: list[str] = []
        self._text: list[str] = []
        self._fresh = thinking is not Thinking.AFTER  # of the present part nothing has been seen

    @property
    def inside(self) -> bool:
        """Whether the next token belongs to a thought, as far as is known."""
        return self._step == self._think

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """Add text. Returns what is certain of thoughts and of the answer."""
        self._buffer += text
        while self._step(last):
            pass
        thought, answer = "".join(self._thought), "".join(self._text)
        self._thought, self._text = [], []
        return thought, answer

    def _start(self, last: bool) -> bool:
        stripped = self._buffer.lstrip()
        if stripped.startswith(self._begin):
            self._buffer = stripped.removeprefix(self._begin)
            self._step = self._think
            return True
        if self._begin.startswith(stripped) and not last:
            return False
        self._fresh, self._step = False, self._answer  # white space before an answer is its own
        return True

    def _think(self, last: bool) -> bool:
        at = self._buffer.find(self._end)
        if at >= 0:
            self._add_thought(self._buffer[:at].rstrip("\n"))
            self._buffer = self._buffer[at + len(self._end) :]
            self._fresh, self._step = True, self._answer
            return True
        if last:
            self._add_thought(self._buffer)
            self._buffer = ""
            return False
        certain = len(self._buffer) - held(self._buffer, self._end)
        certain = len(self._buffer[:certain].rstrip("\n"))
        self._add_thought(self._buffer[:certain])
        self._buffer = self._buffer[certain:]
        return False

    def _add_thought(self, text: str) -> None:
        text = text.lstrip("\n") if self._fresh else text
        if text:
            self._thought.append(text)
            self._fresh = False

    def _answer(self, last: bool) -> bool:
        text = self._buffer.lstrip("\n") if self._fresh else self._buffer
        self._fresh = self._fresh and not text
        self._text.append(text)
        self._buffer = ""
        return False


_RECIPIENT = re.compile(r"\bto=")
_HEADER_BEGINS = ("<|start|>", "<|channel|>", "to=")
_HEADER_END = "<|message|>"
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")


class ChannelSplitter:
    """Splits messages of channels: `analysis` is thought, what goes to a function is left with its
    header for the parser of calls, everything else is the answer."""

    def __init__(self) -> None:
        self._buffer = ""
        self._in_header = True
        self._channel = ""

    @property
    def inside(self) -> bool:
        """Whether the next token belongs to a thought, as far as is known."""
        return not self._in_header and self._channel == "analysis"

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """Add text. Returns what is certain of thoughts and of the answer."""
        self._buffer += text
        thoughts, answers = list[str](), list[str]()
        while self._buffer:
            if self._in_header:
                if self._read_header(answers):
                    continue
                if last and "<|" not in self._buffer:
                    answers.append(self._buffer)
                break
            ends = [(at, end) for end in _BODY_ENDS if (at := self._buffer.find(end)) >= 0]
            at, end = min(ends, default=(-1, ""))
            if at < 0:
                pending = 0 if last else max(held(self._buffer, e) for e in _BODY_ENDS)
                at = len(self._buffer) - pending
            out = thoughts if self._channel == "analysis" else answers
            out.append(self._buffer[:at])
            self._buffer = self._buffer[at:]
            if not end:
                break
            if self._channel == "call":
                answers.append(end)
            if end not in ("<|start|>", "<|channel|>"):
                self._buffer = self._buffer[len(end) :]
            self._in_header = True
        return "".join(thoughts), "".join(answers)

    def _read_header(self, answers: list[str]) -> bool:
        """Whether the header is complete. A model that writes none is taken at its word."""
        start = self._buffer.lstrip()
        if not any(start.startswith(mark) or mark.startswith(start) for mark in _HEADER_BEGINS):
            self._in_header, self._channel = False, "final"
            return True
        header, mark, rest = self._buffer.partition(_HEADER_END)
        if not mark:
            return False
        if _RECIPIENT.search(header):
            self._channel = "call"
            answers.append(header + mark)
        else:
            name = header.partition("<|channel|>")[2].split()
            self._channel = name[0] if name else "final"
        self._in_header, self._buffer = False, rest
        return True


Splitter = PairSplitter | ChannelSplitter
