"""What the commands print: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence


class Console:
    """Prints plain text; progress lines show the time since construction."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, text: str = "") -> None:
        """Print a line of the result."""
        print(text, flush=True)

    def write(self, text: str) -> None:
        """Print part of the result without a line end."""
        print(text, end="", flush=True)

    def step(self, text: str) -> None:
        """Print a line of progress."""
        _tell(f"[{time.monotonic() - self._started:5.1f} s] {text}")

    def warn(self, text: str) -> None:
        _tell(f"baton: warning: {text}")

    def error(self, text: str) -> None:
        _tell(f"baton: error: {text}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print columns, with numbers right-aligned."""
        cells = [[str(cell) for cell in row] for row in (header, *rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        right = [bool(rows) and all(_numeric(row[i]) for row in rows) for i in range(len(header))]
        for row in cells:
            parts = (
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            )
            self.say("  ".join(parts).rstrip())


def _tell(text: str) -> None:
    """Without a reader, the work still has to be done: what was started is stopped."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _numeric(cell: object) -> bool:
    return isinstance(cell, (int, float)) or str(cell)[:1].isdigit()
