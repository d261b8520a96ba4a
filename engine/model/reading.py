"""Typed reading of a config.json: every fault is a ModelRefused naming the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelRefused

Raw = Mapping[str, Any]


def refused(field: str, why: str) -> ModelRefused:
    """The error for a field that is wrong or not served."""
    return ModelRefused(f"config.json: {field}: {why}", param=field)


def number(raw: Raw, field: str, default: float | None = None) -> float:
    """A number; null counts as absent."""
    value = raw.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refused(field, f"expected a number, got {value!r}")
    return float(value)


def positive(raw: Raw, field: str, default: int | None = None) -> int:
    """A positive whole number."""
    value = number(raw, field, default)
    if value < 1 or value != int(value):
        raise refused(field, f"expected a positive whole number, got {value!r}")
    return int(value)


def optional_positive(raw: Raw, field: str) -> int | None:
    """A positive whole number, None when absent or null."""
    return None if raw.get(field) is None else positive(raw, field)


def optional_number(raw: Raw, field: str) -> float | None:
    """A number, None when absent or null."""
    return None if raw.get(field) is None else number(raw, field)
