"""What is remembered of hand-offs that are over, so that late messages are recognised."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from protocol.errors import ErrorInfo, StaleMessage
from protocol.ids import RequestKey

K = TypeVar("K")
T = TypeVar("T")


@dataclass(slots=True)
class FinishedHandoff:
    """Of a hand-off that is over: with which incarnation of the peer it was, and why it failed."""

    peer_epoch: int
    error: ErrorInfo | None


class BoundedMap(Generic[K, T]):
    """The last `limit` records by key; the oldest is forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: OrderedDict[K, T] = OrderedDict()

    def put(self, key: K, record: T) -> None:
        """Remember."""
        self._records[key] = record
        self._records.move_to_end(key)
        while len(self._records) > self._limit:
            self._records.popitem(last=False)

    def get(self, key: K) -> T | None:
        """The record of `key`, if it is still known."""
        return self._records.get(key)

    def take(self, key: K) -> T | None:
        """Forget and return the record of `key`."""
        return self._records.pop(key, None)

    def __len__(self) -> int:
        return len(self._records)


class Attempts:
    """The newest attempt seen of each request; older ones are refused."""

    def __init__(self, limit: int) -> None:
        self._newest: BoundedMap[RequestKey, int] = BoundedMap(limit)

    def admit(self, key: RequestKey) -> RequestKey | None:
        """Note an attempt; the one that it replaces, if any. Raises StaleMessage when it is the
        older."""
        request = RequestKey(key.request_id)
        newest = self._newest.get(request)
        if newest is not None and key.attempt < newest:
            raise StaleMessage(f"{key} is older than attempt {newest}", param="attempt")
        self._newest.put(request, key.attempt)
        return None if newest in (None, key.attempt) else RequestKey(key.request_id, newest)
