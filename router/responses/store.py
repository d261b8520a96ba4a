"""Responses that can be continued, read, cancelled and deleted: in this router's memory, bounded,
for a time."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import InvalidRequest, NotFound

#: What an entry and each of its values cost beside their texts.
_ENTRY_BYTES, _VALUE_BYTES = 2048, 64


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """A response of one caller. `messages` are the chat up to and with its output, without its
    instructions; `items` its input. `task` runs it in the background."""

    owner: str
    response: dict[str, Any]
    items: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]
    task: asyncio.Task[None] | None = None
    expires: float = 0.0
    size: int = 0


class ResponseStore:
    """Holds responses of up to `max_bytes` together, each for `keep_s`; the oldest go first.

    Responses in the background stay until they have ended. Those of another caller are as if they
    did not exist.
    """

    def __init__(self, *, max_bytes: int, keep_s: float, clock: Callable[[], float]) -> None:
        self._max_bytes, self._keep_s, self._clock = max_bytes, keep_s, clock
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.Lock()  # large requests are parsed in threads
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: StoredResponse) -> None:
        """Store or replace a response; it may not fit at all."""
        response_id = entry.response["id"]
        parts = entry.response, entry.items, entry.messages
        entry.size = _ENTRY_BYTES + sum(map(_weight, parts))
        with self._lock:
            self._remove(response_id)
            entry.expires = self._clock() + self._keep_s
            self._entries[response_id] = entry
            self.num_bytes += entry.size
            self._evict()

    def get(self, response_id: str, owner: str, *, param: str | None = None) -> StoredResponse:
        """Raises NotFound, or InvalidRequest when a field named it."""
        with self._lock:
            self._evict()
            entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            message = f"no response {response_id!r} is stored here"
            raise InvalidRequest(message, param=param) if param else NotFound(message)
        return entry

    def messages_up_to(self, response_id: str | None, owner: str) -> Sequence[Mapping[str, Any]]:
        """The chat up to a response that has ended with an output; none without an id. Raises
        InvalidRequest naming the field."""
        if response_id is None:
            return ()
        return ended_messages(self.get(response_id, owner, param=_BEFORE))

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response; one in the background ends. Raises NotFound."""
        entry = self.get(response_id, owner)
        if entry.task is not None:
            entry.task.cancel()
        with self._lock:
            self._remove(response_id)

    def _evict(self) -> None:
        """Entries are in the order of their expiry."""
        now = self._clock()
        running: list[str] = []
        while self._entries:
            response_id, entry = next(iter(self._entries.items()))
            if self.num_bytes <= self._max_bytes and entry.expires > now:
                break
            if entry.task is None:
                self._remove(response_id)
                continue
            self._entries.move_to_end(response_id)
            if response_id in running:
                break
            running.append(response_id)

    def _remove(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self.num_bytes -= entry.size


_BEFORE = "previous_response_id"


def ended_messages(entry: StoredResponse) -> Sequence[Mapping[str, Any]]:
    """The chat up to a response. Raises InvalidRequest unless that has ended with an output."""
    name, status = entry.response["id"], entry.response["status"]
    if status not in ("completed", "incomplete"):
        raise InvalidRequest(f"{_BEFORE}: the response {name!r} is {status}", param=_BEFORE)
    return entry.messages


def _weight(value: object) -> int:
    """About the memory of a JSON value; texts that several entries share count in each."""
    if isinstance(value, str):
        return _VALUE_BYTES + len(value)
    if isinstance(value, Mapping):
        return _VALUE_BYTES + sum(map(_weight, value.values()))
    if isinstance(value, list | tuple):
        return _VALUE_BYTES + sum(map(_weight, value))
    return 0
