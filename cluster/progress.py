"""Progress bars on standard error, plain enough for a log file."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

_WIDTH = 28
_REDRAW_S = 0.1


class ProgressBar:
    """`label [####....] 42%  41.2/98.4 MB`. On a pipe only the first and the last line are written.

    `total` is in `unit`s times `scale` (bytes with scale 1e6 and unit "MB", say).
    """

    def __init__(
        self,
        label: str,
        total: float,
        *,
        unit: str = "MB",
        scale: float = 1e6,
        stream: TextIO | None = None,
    ) -> None:
        self._label = label
        self._total = max(total, 1e-9)
        self._unit = unit
        self._scale = scale
        self._stream = stream if stream is not None else sys.stderr
        self._live = self._stream.isatty()
        self._done = 0.0
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._done = self._total
        self._draw(last=True)

    def advance(self, amount: float) -> None:
        """Add `amount` (not scaled) to what is done."""
        self._done = min(self._total, self._done + amount)
        if self._live and time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._draw()

    def _draw(self, *, last: bool = False) -> None:
        if not self._live and not last:
            return
        self._drawn_at = time.monotonic()
        filled = int(_WIDTH * self._done / self._total)
        bar = "#" * filled + "." * (_WIDTH - filled)
        percent = int(100 * self._done / self._total)
        done, total = self._done / self._scale, self._total / self._scale
        line = f"{self._label} [{bar}] {percent:3d}%  {done:.1f}/{total:.1f} {self._unit}"
        end = "\n" if last else ""
        self._stream.write(("\r" if self._live else "") + line + end)
        self._stream.flush()
