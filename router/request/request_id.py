"""What a request is called."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import new_request_id

#: The header, and over gRPC the key of metadata, in which clients and we give it.
REQUEST_ID = "x-request-id"
_MAX_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestId:
    """`key` is ours alone and never repeated. `name` is what answers, logs and traces say: what the
    client calls it, or the key."""

    key: str
    name: str


def request_id(given: str | None) -> RequestId:
    """The id of a request for which the client gave this one, taken over if it is sane."""
    key, given = new_request_id(), (given or "").strip()
    sane = 0 < len(given) <= _MAX_CHARS and given.isascii() and given.isprintable()
    return RequestId(key=key, name=given if sane else key)
