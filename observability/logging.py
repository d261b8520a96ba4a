"""Structured logs: one line per record, `key=value` pairs after the message.

Secrets and prompt text are never passed to a logger.
"""

from __future__ import annotations

import json
import logging
import os
import sys

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {
    "message",
    "asctime",
    "taskName",
}


class KeyValueFormatter(logging.Formatter):
    """`time level logger message key=value ...`, the pairs taken from `extra`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        pairs = {k: v for k, v in vars(record).items() if k not in _STANDARD and k[0] != "_"}
        return line + "".join(f" {key}={_shown(value)}" for key, value in sorted(pairs.items()))


def _shown(value: object) -> str:
    """The value, quoted when it has spaces, quotes, `=` or line breaks."""
    text = str(value)
    plain = text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, under the root `baton`."""
    return logging.getLogger(f"baton.{name}")


def configure_logging() -> None:
    """Send records of the level BATON_LOG_LEVEL and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter())
    root = logging.getLogger("baton")
    root.handlers = [handler]
    root.propagate = False
    level = os.environ.get("BATON_LOG_LEVEL", "WARNING").upper()
    if level not in (known := logging.getLevelNamesMapping()):
        raise ValueError(f"BATON_LOG_LEVEL must be one of {', '.join(known)}, got {level}")
    root.setLevel(level)
