"""Log lines: pairs that can be read back, whatever the values hold."""

from __future__ import annotations

import logging

import pytest

from observability.logging import KeyValueFormatter, configure_logging


def test_a_value_cannot_be_taken_for_several_or_for_another_line() -> None:
    record = logging.makeLogRecord({"msg": "lost", "name": "baton.x", "levelname": "WARNING"})
    record.worker, record.steps = "decode-1", 3
    record.error = 'no answer\n2026 ERROR baton forged="yes"'
    line = KeyValueFormatter().format(record)
    error = r'"no answer\n2026 ERROR baton forged=\"yes\""'
    assert line.endswith(f" WARNING baton.x lost error={error} steps=3 worker=decode-1")
    assert "\n" not in line


def test_levels_are_known_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger("baton")
    for name in ("level", "handlers", "propagate"):
        monkeypatch.setattr(root, name, getattr(root, name))
    monkeypatch.setenv("BATON_LOG_LEVEL", "debug")
    configure_logging()
    assert root.level == logging.DEBUG
    monkeypatch.setenv("BATON_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match=r"BATON_LOG_LEVEL must be one of .*WARNING.*, got LOUD"):
        configure_logging()
