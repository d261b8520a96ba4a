"""What routers ask each other about stored responses of /v1/responses."""

from __future__ import annotations

from enum import StrEnum

from protocol.message import Message


class ResponseAction(StrEnum):
    """What becomes of a stored response that is asked for."""

    READ = "read"
    CANCEL = "cancel"
    DELETE = "delete"


class ResponseQuery(Message):
    """Ask the router that stored a response of /v1/responses for it, for the caller `owner`."""

    response_id: str
    owner: str
    action: ResponseAction


class ResponseCopy(Message):
    """A stored response as JSON: an array of the response, its input items and its messages."""

    parts: bytes
