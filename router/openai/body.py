"""Reading the body of an HTTP request."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    UnsupportedEncoding,
)
from router.request.body import Body
from router.request.parse import LARGE_BYTES, parse_json

R = TypeVar("R", bound=Body)

#: Time for a client to send a body.
_BODY_TIMEOUT_S = 120.0
#: Bodies of the largest size that may have been received and not yet parsed.
_MAX_UNPARSED_BODIES = 64
_GZIP = 16 + zlib.MAX_WBITS


class BodyReader:
    """Reads bodies of at most `limit` bytes each. The bytes received and not yet parsed are bounded
    over all connections, of which there may be thousands."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._unparsed_bytes = 0

    async def read(self, scope: Scope, receive: Receive, kind: type[R]) -> R:
        """The request of this type in the JSON body; compressed with gzip if the headers say so.

        Raises PayloadTooLarge over the limit, before or after decompression, UnsupportedEncoding
        for other compressions, InvalidRequest for a body that is not such a request,
        DeadlineExceeded when it does not arrive in time, Cancelled when the client disconnects
        before it is complete, Overloaded when too much is unparsed.
        """
        encoding = (Headers(scope=scope).get("content-encoding") or "identity").strip().lower()
        if encoding not in ("identity", "gzip", "x-gzip"):
            raise UnsupportedEncoding(
                f"content-encoding {encoding!r} is not supported; send gzip or no encoding",
                param="content-encoding",
            )
        with self._counted() as count:
            try:
                async with asyncio.timeout(_BODY_TIMEOUT_S):
                    body = await _receive(scope, receive, self._limit, count)
            except TimeoutError:
                raise DeadlineExceeded(f"no body within {_BODY_TIMEOUT_S:g} s") from None
            if encoding != "identity":  # one call: no more bodies are unzipped than threads parse
                return await asyncio.to_thread(
                    lambda: parse_json(_unzipped(body, self._limit), kind)
                )
            if len(body) <= LARGE_BYTES:
                return parse_json(body, kind)
            return await asyncio.to_thread(parse_json, body, kind)

    @contextmanager
    def _counted(self) -> Iterator[Callable[[int], None]]:
        """Counts bytes of one body until it is parsed or refused."""
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            if self._unparsed_bytes + size > _MAX_UNPARSED_BODIES * self._limit:
                raise Overloaded("too many large bodies are being sent")
            self._unparsed_bytes += size
            counted += size

        try:
            yield count
        finally:
            self._unparsed_bytes -= counted


def _unzipped(body: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(_GZIP)
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error:
        raise InvalidRequest("the body is not valid gzip") from None
    if len(plain) > limit:
        raise _too_large(limit)
    if not stream.eof or stream.unused_data:
        raise InvalidRequest("the body is not one whole gzip stream")
    return plain


async def _receive(
    scope: Scope, receive: Receive, limit: int, count: Callable[[int], None]
) -> bytes:
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdigit() and int(declared) > 2 * limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client disconnected while sending")
        part = message.get("body", b"")
        count(len(part))
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()  # read on a little: a client that is still sending misses the answer
        if size > 2 * limit or (size > limit and not message.get("more_body")):
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes")
