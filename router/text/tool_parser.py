"""Extracts tool calls from a text that arrives in pieces.

The name of a call comes with its first delta, its arguments as the model writes them (other
notations than JSON are translated), so their deltas concatenate to JSON. What looks like a call but
is none (unknown name, no JSON) stays text.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from router.text.call_input import CallInput, EndOfText, Reading, held
from router.text.call_notations import reader_of
from router.text.call_readers import NotACall
from router.text.tool_formats import ToolFormat

#: The schemas of the parameters of each function that may be called.
Tools = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class CallDelta:
    """Part of one call. The first of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class _StopReading(Exception):
    """The rest of the text does not count."""


class CallParser:
    """Parses one output into text and `num_calls` calls; white space around calls is dropped.

    Without `several`, text after the first call is dropped, too. With `forced` the output consists
    of calls only, so one cut short before its arguments is dropped. `hidden` are marks that are
    special tokens: they are never text. `make_id` makes ids.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Tools,
        *,
        several: bool = True,
        forced: bool = False,
        hidden: Collection[str] = (),
        make_id: Callable[[ToolFormat], str] | None = None,
    ) -> None:
        self.num_calls = 0
        self.in_arguments = False
        self._format = tool_format
        self._tools = tools
        self._several = several
        self._forced = forced
        self._hidden = frozenset(hidden) | frozenset(tool_format.ornaments)
        self._marks = sorted({*tool_format.begins, *self._hidden}, key=len, reverse=True)
        self._make_id = make_id or call_id
        self._input = CallInput()
        self._opening: str | None = None  # of what may be a call: text if it is none
        self._in_text = True
        self._space = ""  # trailing white space of the text so far
        self._text: list[str] = []
        self._calls: list[CallDelta] = []
        self._reading: Reading[None] | None = self._read()

    def push(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        """Add `text`. Returns the text and the call deltas that are certain, all with `last`."""
        if self._reading is not None and (text or last):
            self._input.add(text, last=last)
            if next(self._reading, _ENDED) is _ENDED:
                self._reading = None
        if last and self.num_calls == 0 and not self._forced:
            self._text.append(self._space)
        certain, calls = "".join(self._text), self._calls
        self._text, self._calls = [], []
        return certain, calls

    # --- what readers tell (CallSink) -------------------------------------------------------------

    def begin(self, name: str) -> None:
        if name not in self._tools:
            raise NotACall
        self._input.drop()
        self._opening = None
        self._space = ""
        self._calls.append(
            CallDelta(index=self.num_calls, arguments="", id=self._make_id(self._format), name=name)
        )
        self.num_calls += 1
        self.in_arguments = True

    def arguments(self, text: str) -> None:
        if not text:
            return
        if self._calls and self._calls[-1].index == self.num_calls - 1:
            self._calls[-1].arguments += text
        else:
            self._calls.append(CallDelta(index=self.num_calls - 1, arguments=text))

    def end(self) -> None:
        self.in_arguments = False
        if not self._several:
            raise _StopReading

    def properties(self, name: str) -> Mapping[str, Any]:
        return self._tools[name]

    # --- reading ----------------------------------------------------------------------------------

    def _read(self) -> Reading[None]:
        """Text and calls in turn, to the end."""
        try:
            if self._format.whole_text:
                yield from self._read_call("")
            while True:
                self._in_text = True
                mark = yield from self._read_text()
                if mark not in self._hidden or mark in self._format.begins:
                    yield from self._read_call(mark)
        except EndOfText:
            self._finish()
        except _StopReading:
            pass

    def _read_text(self) -> Reading[str]:
        """Pass on text up to the next mark, and return that."""
        source = self._input
        while True:
            found = [(at, mark) for mark in self._marks if (at := source.text.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                self._add_text(source.text[:at])
                source.at = at + len(mark)
                source.drop()
                return mark
            keep = max((held(source.text, mark) for mark in self._marks), default=0)
            source.at = len(source.text) - keep
            self._add_text(source.text[: source.at])
            source.drop()
            yield from source.more()

    def _read_call(self, mark: str) -> Reading[None]:
        self._opening, self._in_text = mark, False
        try:
            yield from reader_of(self._format, mark)(self._input, self)
        except NotACall:
            self._input.at = 0
            self._add_text(self._shown(self._opening or ""))
        self._opening = None
        self._input.drop()

    def _finish(self) -> None:
        """The text ended: what is not read yet is text, or the rest of a call."""
        if self._forced:
            self._space = ""
        elif self._opening is not None or self._in_text:
            self._add_text(self._shown((self._opening or "") + self._input.text))

    def _shown(self, text: str) -> str:
        for mark in self._hidden:
            text = text.replace(mark, "")
        return text

    def _add_text(self, text: str) -> None:
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        self._text.append(shown)


_ENDED: Any = object()


def call_id(tool_format: ToolFormat) -> str:
    """A fresh id; Mistral's templates insist on nine letters and digits."""
    if tool_format in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_NAMED):
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
