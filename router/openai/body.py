"""Reading the JSON bodies of requests, with bounds on the size of each and of all together."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
from router.openai.json_chunks import loads_in_pieces, refuse_constant
from router.request.fields import as_object

#: Bodies of more bytes are parsed in a thread.
_LARGE = 1 << 17
#: For a client to send a body.
_BODY_S = 120.0
#: So many of the largest may have come and not be parsed.
_WHOLE_BODIES = 64
_GZIP = 16 + zlib.MAX_WBITS


class Bodies:
    """Reads the bodies of one door, each of at most `limit` bytes. What has come of those that are
    not parsed yet is bounded: connections may be thousands."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._unparsed = 0  # bytes

    async def read_object(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        """The JSON object that is the body; compressed with gzip if the request says so.

        Raises PayloadTooLarge over the limit, before or after decompression, UnsupportedEncoding
        for other compressions, InvalidRequest when it is not a JSON object in UTF-8,
        DeadlineExceeded when it does not come in time, Cancelled when the client goes away before
        it is complete, Overloaded when too much is unparsed.
        """
        encoding = (Headers(scope=scope).get("content-encoding") or "identity").strip().lower()
        if encoding not in ("identity", "gzip", "x-gzip"):
            raise UnsupportedEncoding(
                f"content-encoding {encoding!r} is not read here; send gzip, or the body as it is",
                param="content-encoding",
            )
        with self._counted() as count:
            try:
                async with asyncio.timeout(_BODY_S):
                    body = await _read(scope, receive, self._limit, count)
            except TimeoutError:
                raise DeadlineExceeded(f"the body did not come in {_BODY_S:g} s") from None
            if encoding != "identity":  # in one go: no more is unzipped at once than threads have
                return await asyncio.to_thread(lambda: parse_object(_unzipped(body, self._limit)))
            if len(body) <= _LARGE:
                return parse_object(body)
            return await asyncio.to_thread(parse_object, body)

    @contextmanager
    def _counted(self) -> Iterator[Callable[[int], None]]:
        """Counts bytes of one body, until it is parsed or refused."""
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            if self._unparsed + size > _WHOLE_BODIES * self._limit:
                raise Overloaded("too many large bodies are being sent")
            self._unparsed += size
            counted += size

        try:
            yield count
        finally:
            self._unparsed -= counted


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; in a large one long arrays of token ids are `array('q')`."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None
    try:
        if len(body) <= _LARGE:
            value = json.loads(text, parse_constant=refuse_constant)
        else:
            value = loads_in_pieces(text)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        # Without Python's advice on how to allow longer numbers.
        fault = str(error).partition("; use sys.")[0]
        raise InvalidRequest(f"the body is not valid JSON: {fault}") from None
    return as_object(value, "body")


def _unzipped(body: bytes, limit: int) -> bytes:
    """What gzip made `body` from, if it is no larger than `limit`."""
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


async def _read(scope: Scope, receive: Receive, limit: int, count: Callable[[int], None]) -> bytes:
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
        count(len(part))
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
    declared = Headers(scope=scope).get("content-length", "")
    return int(declared) if declared.isdigit() else 0


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes")
