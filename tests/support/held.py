"""A call that blocks until the test releases it."""

from __future__ import annotations

import threading


class Held:
    """Call it where the code under test should block, on a thread that may wait."""

    LIMIT_S = 60.0  # however busy the machine is

    def __init__(self) -> None:
        self._begun, self._go_on = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self._begun.set()
        assert self._go_on.wait(self.LIMIT_S)

    def begun(self) -> bool:
        """Wait until it is called."""
        return self._begun.wait(self.LIMIT_S)

    def release(self) -> None:
        self._go_on.set()
