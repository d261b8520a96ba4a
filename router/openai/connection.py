"""One HTTP connection: uvicorn's, with bounds on clients that send or read nothing."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from protocol.errors import BatonError, InvalidRequest, Unavailable
from router.openai.errors import JSON_TYPE, error_body, error_headers, error_status
from router.request.request_id import REQUEST_ID, RequestId, request_id

#: Bytes of a request's head that are read before it counts as endless.
MAX_HEAD_BYTES = 1 << 16
#: For a client to send the head of a request, from when it connects or begins one, and what is left
#: of a body that has been answered.
HEAD_S = 60.0
#: Requests sent ahead of the one that is answered. Each read of a connection may bring thousands.
MAX_AHEAD = 64
#: For a client to send the request that it is refused: sent to a closed connection it would be
#: answered with a reset, and some clients then do not read what came before.
_REFUSED_S = 1.0
_HANG_UP = "baton.hang_up"
_ID = "baton.request_id"
_HEAD_END = b"\r\n\r\n"
_OFFER = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class HttpConnection(HttpToolsProtocol):
    """Heads are bounded in size and time, and what nobody reads is dropped in the end. Every answer
    says what its request is called, whoever makes it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes: int | None = 0  # of the head that is being read; None in a body
        self._num_heads = 0
        self._patience: asyncio.TimerHandle | None = None
        self._answering: Any = None  # the request whose answer is being made
        self._admitted = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request, if there is room for one more."""
        super().connection_made(transport)
        self._admitted = self.connections.admit()  # type: ignore[attr-defined]
        if self._admitted:
            self._expect_head()
        else:
            self._patience = self.loop.call_later(_REFUSED_S, self._turn_away)

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing. uvicorn tells the request that came last, which may not have begun."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)
        self._head_came()

    def data_received(self, data: bytes) -> None:
        """Count what comes before the end of a head."""
        if not self._admitted:
            self._turn_away()
            return
        in_head, heads = self._head_bytes, self._num_heads
        super().data_received(data if in_head is None else _declined(data))
        if in_head is None or heads != self._num_heads:
            return
        self._head_bytes = in_head + len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """It is there."""
        if self.parser.should_upgrade():  # an offer cut in two: the body would be another request
            raise ValueError("another protocol is offered")
        self._head_came()
        self._head_bytes = None
        self._num_heads += 1
        self.scope[_HANG_UP] = self.transport.abort  # type: ignore[literal-required]
        called = request_id(Headers(raw=self.headers).get(REQUEST_ID))
        self.scope[_ID] = called  # type: ignore[literal-required]
        super().on_headers_complete()
        self.cycle.default_headers = [*self.cycle.default_headers, _header(called)]
        if self.expect_100_continue:  # whoever gets an answer instead may not send the body at all
            self.cycle.keep_alive = False
        if len(self.pipeline) > MAX_AHEAD:
            self.transport.abort()
            raise ValueError("too many requests sent ahead")  # so that the parser stops here

    def on_message_complete(self) -> None:
        """What comes now is another head."""
        super().on_message_complete()
        if self.expect_100_continue:
            self.cycle.keep_alive = self.parser.should_keep_alive()
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        """The next request may come; what is still sent of an answered one keeps nobody here."""
        super().on_response_complete()
        if self._head_bytes is None and self.cycle.response_complete:
            self._expect_head()

    def timeout_keep_alive_handler(self) -> None:
        """Idle for too long; an answer that is still there will not be read either."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _turn_away(self) -> None:
        self._refuse(Unavailable("too many connections are open"))

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP. No answer is put into the middle of another."""
        answer = self._answering
        if answer is not None and answer.response_started and not answer.response_complete:
            self.transport.close()
        else:
            self._refuse(InvalidRequest(msg))

    def _refuse(self, error: BatonError) -> None:
        body = error_body(error)
        headers = [
            *(*self.server_state.default_headers, _header(request_id(None))),
            *(JSON_TYPE, *error_headers(error), (b"connection", b"close")),
            (b"content-length", b"%d" % len(body)),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        status = STATUS_LINE[error_status(error)]
        self.transport.write(b"".join([status, *lines, b"\r\n", body]))
        self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        self._head_came()
        self._patience = self.loop.call_later(HEAD_S, self.transport.abort)

    def _head_came(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _declined(data: bytes) -> bytes:
    """A head without the offer to speak another protocol (`Upgrade: h2c`, as Java's clients send it
    by default): the parser would take a body for that protocol. Whoever offers goes on without."""
    head, end, rest = data.partition(_HEAD_END)
    return _OFFER.sub(b"\r\nnot-taken:", head) + end + rest if _OFFER.search(head) else data


def _header(called: RequestId) -> tuple[bytes, bytes]:
    return REQUEST_ID.encode(), called.name.encode()


def id_of(scope: Scope) -> RequestId:
    """What a request is called."""
    called: RequestId = scope[_ID]
    return called


def hang_up(scope: Scope) -> None:
    """Close the connection of a request at once, whatever is still to be sent."""
    abort = scope.get(_HANG_UP)
    if abort is not None:
        abort()
