"""Defects that only a log tells of."""

from __future__ import annotations

import logging


class Faults(logging.Handler):
    """Collects what background tasks die of: nothing, if the code is right."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def check(self) -> None:
        """Raise the first."""
        for record in self.records:
            raise AssertionError(record.getMessage()) from (record.exc_info or (0, None))[1]
