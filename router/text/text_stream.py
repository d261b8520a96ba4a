"""The text of one output: detokenised, searched for stop strings, cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from protocol.states import FinishReason
from router.text.detokenizer import Detokenizer
from router.text.reasoning import Splitter
from router.text.stop_strings import StopMatcher
from router.text.tool_parser import CallDelta, CallParser

_NONE: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParts:
    """What takes calls and thoughts out of one output, and whether thoughts are shown."""

    calls: CallParser | None = None
    thoughts: Splitter | None = None
    shows_thoughts: bool = True


class TextStream:
    """Turns the output tokens of one sequence into text, in order.

    A stop or end token is not part of the text, unless `include_stop`. Stop strings count from the
    first token after `min_tokens`; a match must lie wholly behind it. `tokens` counts every output
    token, `characters` those of their text, cut or not, up to the last complete one. What
    `parts` take out of the text the last token adds to `calls` and `reasoning`; `reasoning_tokens`
    counts tokens of thoughts.

    Where the detokenizer leaves special tokens out, stop strings match the spellings of those in
    `hidden` (by id) all the same, and those in `marks` are put into the text for the `parts`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        *,
        min_tokens: int,
        include_stop: bool = False,
        parts: OutputParts | None = None,
        hidden: Mapping[int, str] = _NONE,
        marks: Mapping[int, str] = _NONE,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        parts = parts or OutputParts()
        self._parser, self._splitter = parts.calls, parts.thoughts
        self._shows_reasoning = parts.shows_thoughts
        self._hidden = hidden
        self._marks = marks
        self.tokens = 0
        self.characters = 0
        self.finish: FinishReason | None = None
        self.calls: list[CallDelta] = []
        self.reasoning = ""
        self.reasoning_tokens = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.matched

    @property
    def plain(self) -> bool:
        """Whether all text is shown as it is, by no parser of calls or thoughts."""
        return self._parser is None and self._splitter is None

    @property
    def num_held(self) -> int:
        """The latest tokens whose text is held back: it may be the start of a stop string."""
        return self._stops.num_held

    def push(self, token: int, finish: FinishReason | None) -> str:
        """Add a token. Returns the text that becomes certain; sets `finish` at the end."""
        self.tokens += 1
        left_out = finish is FinishReason.STOP and not self._include_stop
        text = "" if left_out else self._detokenizer.push(token)
        if token in self._marks and not left_out:
            text += self._marks[token]
        self.characters += len(text)
        if finish is not None:
            text += self._detokenizer.flush()
        if self.tokens > self._min_tokens:
            hidden = "" if left_out else self._hidden.get(token, "")
            text = self._stops.push(text, hidden)
        if self._stops.matched is not None:
            self.finish = FinishReason.STOP
        elif finish is not None:
            self.finish = finish
            text += self._stops.flush()
        if self._splitter is not None:
            text = self._without_thoughts(text, self._splitter)
        return text if self._parser is None else self._without_calls(text, self._parser)

    def _without_thoughts(self, text: str, splitter: Splitter) -> str:
        inside = splitter.inside
        thought, text = splitter.push(text, last=self.finish is not None)
        self.reasoning = thought if self._shows_reasoning else ""
        self.reasoning_tokens += inside or splitter.inside
        return text

    def _without_calls(self, text: str, parser: CallParser) -> str:
        text, self.calls = parser.push(text, last=self.finish is not None)
        # A stop string can cut a call short: its arguments are no JSON then.
        if self.finish is FinishReason.STOP and parser.num_calls and not parser.in_arguments:
            self.finish = FinishReason.TOOL_CALLS
        return text
