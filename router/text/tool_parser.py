"""Extracts tool calls from a text that arrives in pieces.

The name of a call comes with its first delta, its arguments as the model writes them, so their
deltas concatenate to the model's JSON. What looks like a call but is none (unknown name, no JSON)
stays text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto

from router.text.tool_formats import PYTHON_TAG, ToolFormat

#: A call up to its arguments, when these are an object and come after the name.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
#: Mistral's newer format: a name, perhaps an id, then the arguments.
_NAMED = re.compile(r"\s*([\w-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAMED_SO_FAR = re.compile(r"\s*[\w-]*\s*(?:\[[\w\[\]\s]*)?")
_END = "</tool_call>"


@dataclass(slots=True)
class CallDelta:
    """Part of one call. The first of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class _State(Enum):
    START = auto()  # only white space so far
    TEXT = auto()
    CALL = auto()  # in what may be a call; its name is not known yet
    ARGUMENTS = auto()
    CLOSE = auto()  # after the arguments, still in the call
    BETWEEN = auto()  # after a call, where another may follow
    DONE = auto()  # the rest is dropped


class CallParser:
    """Parses one output into text and `num_calls` calls; white space around calls is dropped.

    Without `several`, text after the first call is dropped, too. With `forced` the output consists
    of calls only, so one cut short before its arguments is dropped. `make_id` makes ids.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        several: bool = True,
        forced: bool = False,
        make_id: Callable[[ToolFormat], str] | None = None,
    ) -> None:
        self.num_calls = 0
        self._format = tool_format
        self._names = names
        self._several = several
        self._forced = forced
        self._make_id = make_id or call_id
        self._state = _State.START if tool_format is ToolFormat.LLAMA else _State.TEXT
        self._buffer = ""
        self._opening = ""  # of what may be a call: text if it is none
        self._in_array = False
        self._scan = _ObjectEnd()
        self._scanned = 0
        self._space = ""  # trailing white space of the text so far
        self._text: list[str] = []
        self._calls: list[CallDelta] = []
        self._steps: dict[_State, Callable[[], bool]] = {
            _State.START: self._start,
            _State.TEXT: self._look_for_call,
            _State.CALL: self._open_call,
            _State.ARGUMENTS: self._pass_arguments,
            _State.CLOSE: self._close_call,
            _State.BETWEEN: self._look_for_next,
            _State.DONE: lambda: False,
        }

    @property
    def in_arguments(self) -> bool:
        return self._state is _State.ARGUMENTS

    def push(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        """Add `text`. Returns the text and the call deltas that are certain, all with `last`."""
        self._buffer += text
        while self._buffer and self._steps[self._state]():
            pass
        if last:
            self._finish()
        certain, calls = "".join(self._text), self._calls
        self._text, self._calls = [], []
        return certain, calls

    def _finish(self) -> None:
        if self._forced:
            self._space = ""
        elif self._state is _State.CALL:
            self._add_text(self._opening + self._buffer)
        elif self._state in (_State.START, _State.TEXT):
            self._add_text(self._buffer)
        self._buffer = ""
        if self.num_calls == 0:
            self._text.append(self._space)

    def _add_text(self, text: str) -> None:
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        self._text.append(shown)

    # --- steps: each returns whether another may follow -------------------------------------------

    def _start(self) -> bool:
        """Llama's calls are the whole text, or what follows its tag."""
        stripped = self._buffer.lstrip()
        if PYTHON_TAG.startswith(stripped):
            return False
        rest = stripped.removeprefix(PYTHON_TAG).lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._expect_call(len(self._buffer) - len(rest))
        else:
            self._state = _State.TEXT
        return True

    def _look_for_call(self) -> bool:
        begin, buffer = self._format.begin, self._buffer
        at = buffer.find(begin) if begin else -1
        if at >= 0:
            self._add_text(buffer[:at])
            self._buffer = buffer[at:]
            self._in_array = False
            self._expect_call(len(begin))
            return True
        certain = len(buffer) - _prefix_length(buffer, begin)
        self._add_text(buffer[:certain])
        self._buffer = buffer[certain:]
        return False

    def _expect_call(self, opening: int) -> None:
        self._opening, self._buffer = self._buffer[:opening], self._buffer[opening:]
        self._scan, self._scanned = _ObjectEnd(), 0
        self._state = _State.CALL

    def _open_call(self) -> bool:
        head = _HEAD.match(self._buffer)
        if head is not None:
            return self._begin(_name(head[1]), head.end())
        stripped = self._buffer.lstrip()
        if not stripped:
            return False
        if stripped[0] == "{":
            return self._whole_call()
        if self._format is not ToolFormat.MISTRAL or self._in_array:
            return self._is_text()
        if stripped[0] == "[" and not stripped.startswith(("[ARGS", "[CALL_ID")):
            self._in_array = True
            self._opening += self._buffer[: len(self._buffer) - len(stripped) + 1]
            self._buffer = stripped[1:]
            self._scan, self._scanned = _ObjectEnd(), 0
            return True
        named = _NAMED.match(self._buffer)
        if named is not None:
            return self._begin(named[1], named.end())
        return _NAMED_SO_FAR.fullmatch(self._buffer) is None and self._is_text()

    def _whole_call(self) -> bool:
        """A call with another key order, or arguments that are no object, is parsed at its end."""
        end = self._scan.find(self._buffer[self._scanned :])
        if end is None:
            self._scanned = len(self._buffer)
            return False
        end += self._scanned
        call = _read_call(self._buffer[:end])
        if call is None or not self._begin(call[0], end):
            return self._is_text()
        self._calls[-1].arguments = call[1]
        self._state = _State.CLOSE if self._format is ToolFormat.HERMES else _State.BETWEEN
        return self._another()

    def _begin(self, name: str, consumed: int) -> bool:
        if name not in self._names:
            return self._is_text()
        self._buffer = self._buffer[consumed:]
        self._calls.append(
            CallDelta(index=self.num_calls, arguments="", id=self._make_id(self._format), name=name)
        )
        self.num_calls += 1
        self._space = ""
        self._scan = _ObjectEnd()
        self._state = _State.ARGUMENTS
        return True

    def _is_text(self) -> bool:
        """What looked like a call is text."""
        self._add_text(self._opening)
        self._opening = ""
        self._state = _State.TEXT
        return True

    def _pass_arguments(self) -> bool:
        end = self._scan.find(self._buffer)
        arguments = self._buffer if end is None else self._buffer[:end]
        self._buffer = self._buffer[len(arguments) :]
        if self._calls and self._calls[-1].index == self.num_calls - 1:
            self._calls[-1].arguments += arguments
        else:
            self._calls.append(CallDelta(index=self.num_calls - 1, arguments=arguments))
        if end is None:
            return False
        named = self._format is ToolFormat.MISTRAL and not self._in_array
        self._scan = _ObjectEnd(depth=1)
        self._state = _State.TEXT if named else _State.CLOSE
        return self._another()

    def _another(self) -> bool:
        if not self._several:
            self._state = _State.DONE
        return True

    def _close_call(self) -> bool:
        """Skip to the end of the call's object or, for Hermes, of its closing mark."""
        if self._format is ToolFormat.HERMES:
            at = self._buffer.find(_END)
            if at < 0:
                self._buffer = self._buffer[-len(_END) :]
                return False
            self._buffer = self._buffer[at + len(_END) :]
            self._state = _State.TEXT
            return True
        end = self._scan.find(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._state = _State.BETWEEN
        return end is not None

    def _look_for_next(self) -> bool:
        stripped = self._buffer.lstrip().removeprefix("," if self._in_array else ";").lstrip()
        if not stripped:
            return False
        self._buffer = stripped
        if stripped[0] == "{":
            self._expect_call(0)
        else:
            self._buffer = stripped.removeprefix("]") if self._in_array else stripped
            self._state = _State.TEXT
        return True


class _ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces; `depth` objects are open already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """How many characters of `text` belong to it; None when it does not end there."""
        for at, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                else:
                    self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete call; None when it is not one."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _name(text: str) -> str:
    r"""The value of a JSON string; empty when it is invalid (`"get\_weather"`)."""
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


def _prefix_length(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)


def call_id(tool_format: ToolFormat) -> str:
    """A fresh id; Mistral's templates insist on nine letters and digits."""
    if tool_format is ToolFormat.MISTRAL:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
