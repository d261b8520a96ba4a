"""A map with a limit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(Generic[K, V]):
    """The last `limit` records by key. `put` makes a record the newest; the oldest is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: OrderedDict[K, V] = OrderedDict()

    def put(self, key: K, record: V) -> None:
        self._records[key] = record
        self._records.move_to_end(key)
        if len(self._records) > self._limit:
            self._records.popitem(last=False)

    def get(self, key: K) -> V | None:
        return self._records.get(key)

    def pop(self, key: K) -> V | None:
        return self._records.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)
