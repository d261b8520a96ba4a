"""One HTTP exchange over ASGI: reading the body, sending the answer, watching for a disconnect."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from protocol.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    UnsupportedEncoding,
)
from router.errors import MAX_PARAM
from router.offload import encode_in_pieces, off_loop
from router.openai.errors import JSON_TYPE, error_body, error_headers, error_status
from router.openai.server import hang_up
from router.request.parse import LARGE_BYTES, parse_json

R = TypeVar("R")

#: Time for a client to send a body.
_BODY_TIMEOUT_S = 120.0
#: Bodies of the largest size that may have been received and not yet parsed.
_MAX_UNPARSED_BODIES = 64
_GZIP = 16 + zlib.MAX_WBITS


class BodyReader:
    """Reads bodies of at most `limit` bytes each. The bytes received and not yet parsed are bounded
    over all connections, of which there may be thousands."""

    def __init__(self, limit: int, *, strict: bool = False) -> None:
        """With `strict`, fields that are unknown or without effect are refused."""
        self._limit = limit
        self._strict = strict
        self._unparsed_bytes = 0

    async def request(
        self,
        scope: Scope,
        receive: Receive,
        answer: HttpAnswer,
        kind: type[Any],
        begin: Callable[[Any, list[str] | None], Any] = lambda request, _: request,
    ) -> Any:
        """The request of this type in the body, or what `begin` makes of it and of the list of the
        fields left out (None: refuse them), which a header of `answer` names. Raises
        InvalidRequest, and errors as below."""
        ignored: list[str] = []
        into = None if self._strict else ignored
        made = await self._read(
            scope, receive, lambda body: begin(parse_json(body, kind, into), into)
        )
        answer.headers += ignored_header(ignored)
        return made

    async def _read(self, scope: Scope, receive: Receive, parse: Callable[[bytes], R]) -> R:
        """What `parse` makes of the body, in a thread when it is large; decompressed if the headers
        say so.

        Raises PayloadTooLarge over the limit, before or after decompression, UnsupportedEncoding
        for other compressions, what `parse` raises, DeadlineExceeded when it does not arrive in
        time, Cancelled when the client disconnects before it is complete, Overloaded when too much
        is unparsed.
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
                return await asyncio.to_thread(lambda: parse(_unzipped(body, self._limit)))
            if len(body) <= LARGE_BYTES:
                return parse(body)
            return await asyncio.to_thread(parse, body)

    @contextmanager
    def _counted(self) -> Iterator[Callable[[int], None]]:
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


HeaderList = list[tuple[bytes, bytes]]
IGNORED_FIELDS = b"baton-ignored-fields"

#: The last one keeps proxies like nginx from holding events back.
STREAM_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
#: Time for a client to read enough that the end of its stream fits the buffers.
_END_TIMEOUT_S = 30.0


#: Of the fields that were left out, so many are looked at and so many named, each cut to so many
#: characters.
_MAX_LOOKED_AT, _MAX_NAMED, _MAX_NAME_CHARS = 1024, 32, 64
_INDEX = re.compile(r"\[\d+\]")
_NOT_A_NAME = re.compile(r"[^\w.\[\]-]", re.ASCII)


def ignored_header(ignored: Sequence[str]) -> HeaderList:
    """The header that names the fields of a request that were left out; none without any."""
    if not ignored:
        return []
    first = ignored[:_MAX_LOOKED_AT]
    names = list(dict.fromkeys(_INDEX.sub("[]", name[:MAX_PARAM]) for name in first))
    shown = [_NOT_A_NAME.sub("?", name)[:_MAX_NAME_CHARS] for name in names[:_MAX_NAMED]]
    more = ["..."] if len(names) > _MAX_NAMED or len(ignored) > len(first) else []
    return [(IGNORED_FIELDS, ", ".join([*shown, *more]).encode())]


class HttpAnswer:
    """One HTTP answer. `started` says whether its status line was sent. `headers` are sent with it,
    whatever it is."""

    def __init__(
        self, scope: Scope, send: Send, body_of: Callable[[BatonError], bytes] = error_body
    ) -> None:
        """`body_of` writes an error in the form of the path's API."""
        self.started = False
        self.headers: HeaderList = []
        self._body_of = body_of
        self.failed: Callable[[BatonError], bytes] = partial(_failed, body_of)
        self._scope = scope
        self._send = send

    async def whole(self, status: int, body: bytes, headers: HeaderList) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [*headers, length])
        await self._send({"type": "http.response.body", "body": body})

    async def object(self, value: Mapping[str, Any], *, size: int) -> None:
        """Send a JSON object of about `size` items with status 200."""
        body = await off_loop(lambda: encode_in_pieces(value).encode(), size=size)
        await self.whole(200, body, [JSON_TYPE])

    async def begin_stream(self, headers: HeaderList) -> None:
        await self._start(200, [*STREAM_HEADERS, *headers])

    async def part(self, events: bytes, *, last: bool = False) -> None:
        message = {"type": "http.response.body", "body": events, "more_body": not last}
        await self._send(message)

    async def error(self, error: BatonError) -> None:
        """Send an error: as the answer or, inside a stream, as its last event without [DONE], so
        that it cannot be taken for success. After a disconnect nothing is sent."""
        if isinstance(error, Cancelled):
            return
        if not self.started:
            headers = [JSON_TYPE, *error_headers(error)]
            await self.whole(error_status(error), self._body_of(error), headers)
            return
        await self.ended(partial(self.part, self.failed(error), last=True))

    async def ended(self, send: Callable[[], Awaitable[None]]) -> None:
        """Send the end of an answer; close the connection of a client that does not read it."""
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await send()
        except TimeoutError:
            hang_up(self._scope)

    async def _start(self, status: int, headers: HeaderList) -> None:
        self.started = True
        start = {"type": "http.response.start", "status": status}
        await self._send({**start, "headers": [*headers, *self.headers]})


def _failed(body_of: Callable[[BatonError], bytes], error: BatonError) -> bytes:
    return b"data: " + body_of(error) + b"\n\n"


@asynccontextmanager
async def cancelled_when_gone(receive: Receive) -> AsyncIterator[None]:
    """End the block with Cancelled when the client disconnects. The request's body must have been
    read before."""
    task = asyncio.current_task()
    assert task is not None
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if disconnected and task.uncancel() == 0:
            raise Cancelled("the client disconnected") from None
        raise
    finally:
        watcher.cancel()
