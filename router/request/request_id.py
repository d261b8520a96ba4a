"""The id of a request, and the name that its client gives it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import new_request_id

#: The HTTP header, or key of gRPC metadata, with the name of a request.
REQUEST_ID = "x-request-id"
_MAX_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestId:
    """`key` is unique in the cluster. `name` is what answers, logs and traces show: the client's
    name for the request, or the key."""

    key: str
    name: str


def make_request_id(client_name: str | None) -> RequestId:
    """A new id. The client's name is kept when it is 1 to 128 printable ASCII characters."""
    key, name = new_request_id(), (client_name or "").strip()
    valid = 0 < len(name) <= _MAX_CHARS and name.isascii() and name.isprintable()
    return RequestId(key=key, name=name if valid else key)
