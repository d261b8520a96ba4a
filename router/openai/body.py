"""Reading a request's JSON body, with a bound on its size."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.types import Receive, Scope

from protocol.errors import Cancelled, InvalidRequest, PayloadTooLarge
from router.fields import as_object


async def read_object(scope: Scope, receive: Receive, *, limit: int) -> dict[str, Any]:
    """The JSON object that is the body.

    Raises PayloadTooLarge over `limit` bytes, InvalidRequest when it is not a JSON object in UTF-8,
    Cancelled when the client goes away before it is complete.
    """
    return parse_object(await _read(scope, receive, limit))


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        # Without Python's advice on how to allow longer numbers.
        fault = str(error).partition("; use sys.")[0]
        raise InvalidRequest(f"the body is not valid JSON: {fault}") from None
    return as_object(value, "body")


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes:
    declared = _declared_length(scope)
    if declared > 2 * limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away while sending")
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()  # read on a little: a client that is still sending would miss the answer
        if size > 2 * limit or (size > limit and not message.get("more_body")):
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join(parts)


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
