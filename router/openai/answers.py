"""Sending answers over ASGI: whole bodies, event streams, errors; and watching for disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from protocol.errors import BatonError, Cancelled
from router.offload import encode_in_pieces, off_loop
from router.openai.connection import hang_up
from router.openai.errors import JSON_TYPE, error_body, error_headers, error_status

Headers = list[tuple[bytes, bytes]]

#: The last one keeps proxies like nginx from holding events back.
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
#: Time for a client to read enough that the end of its stream fits the buffers.
_END_TIMEOUT_S = 30.0


class HttpAnswer:
    """One HTTP answer. `started` says whether its status line was sent."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.started = False
        self._scope = scope
        self._send = send

    async def whole(self, status: int, body: bytes, headers: Headers) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [*headers, length])
        await self._send({"type": "http.response.body", "body": body})

    async def object(self, value: Mapping[str, Any], *, size: int) -> None:
        """Send a JSON object of about `size` items with status 200."""
        body = await off_loop(lambda: encode_in_pieces(value).encode(), size=size)
        await self.whole(200, body, [JSON_TYPE])

    async def begin_stream(self, headers: Headers) -> None:
        """Send the head of an event stream."""
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
            await self.whole(error_status(error), error_body(error), headers)
            return
        last = b"data: " + error_body(error) + b"\n\n"
        await self.ended(partial(self.part, last, last=True))

    async def ended(self, send: Callable[[], Awaitable[None]]) -> None:
        """Send the end of an answer; close the connection of a client that does not read it."""
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await send()
        except TimeoutError:
            hang_up(self._scope)

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


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
