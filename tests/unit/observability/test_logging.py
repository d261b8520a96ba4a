"""Log lines: pairs that can be read back, whatever the values hold."""

from __future__ import annotations

import logging

from observability.logging import KeyValueFormatter


def test_a_value_cannot_be_taken_for_several_or_for_another_line() -> None:
    record = logging.makeLogRecord({"msg": "lost", "name": "baton.x", "levelname": "WARNING"})
    record.worker, record.steps = "decode-1", 3
    record.error = 'no answer\n2026 ERROR baton forged="yes"'
    line = KeyValueFormatter().format(record)
    error = r'"no answer\n2026 ERROR baton forged=\"yes\""'
    assert line.endswith(f" WARNING baton.x lost error={error} steps=3 worker=decode-1")
    assert "\n" not in line
