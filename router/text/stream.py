"""The text of one output: detokenised, searched for stop strings, cut."""

from __future__ import annotations

from protocol.states import FinishReason
from router.text.detokenizer import Detokenizer
from router.text.stops import StopMatcher
from router.text.tool_parser import CallDelta, CallParser


class TextStream:
    """Turns the output tokens of one sequence into text, in order.

    A stop or end token is not part of the text, unless `include_stop`. Stop strings count from the
    first token after `min_tokens`; a match must lie wholly behind it. `tokens` counts every output
    token, `characters` those of their text, cut or not, up to the last complete one. With a
    `parser`, tool calls are taken out of the text; `calls` is what the last token adds to them.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        *,
        min_tokens: int,
        include_stop: bool = False,
        parser: CallParser | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._parser = parser
        self.tokens = 0
        self.characters = 0
        self.finish: FinishReason | None = None
        self.calls: list[CallDelta] = []

    def push(self, token: int, finish: FinishReason | None) -> str:
        """The text that this token makes certain. Sets `finish` when the output ends with it."""
        self.tokens += 1
        hidden = finish is FinishReason.STOP and not self._include_stop
        text = "" if hidden else self._detokenizer.push(token)
        self.characters += len(text)
        if finish is not None:
            text += self._detokenizer.flush()
        if self.tokens > self._min_tokens:
            text = self._stops.push(text)
        if self._stops.matched:
            self.finish = FinishReason.STOP
        elif finish is not None:
            self.finish = finish
            text += self._stops.flush()
        return text if self._parser is None else self._without_calls(text, self._parser)

    def _without_calls(self, text: str, parser: CallParser) -> str:
        text, self.calls = parser.push(text, last=self.finish is not None)
        # A stop string can cut a call short: then its arguments are no JSON, and nobody may run it.
        if self.finish is FinishReason.STOP and parser.num_calls and not parser.in_arguments:
            self.finish = FinishReason.TOOL_CALLS
        return text
