"""Something that stops in the middle until the test lets it go."""

from __future__ import annotations

import threading


class Held:
    """To be called where the code under test is to stop, on a thread that may wait."""

    def __init__(self) -> None:
        self._begun, self._go_on = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self._begun.set()
        assert self._go_on.wait(10)

    def begun(self) -> bool:
        """Wait until it is called."""
        return self._begun.wait(10)

    def release(self) -> None:
        self._go_on.set()
