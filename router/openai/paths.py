"""The operations of the HTTP front end, for every API whose form it speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from protocol.errors import BatonError, Overloaded
from protocol.timeline import parse_trace
from router.auth.keys import ANYONE, Caller
from router.dispatch.request_run import Delta, RequestRun
from router.offload import off_loop
from router.openai.errors import JSON_TYPE
from router.openai.exchange import (
    BodyReader,
    HeaderList,
    HttpAnswer,
    cancelled_when_gone,
)
from router.openai.server import request_id_of
from router.request.generate_request import GenerateRequest, RequestId
from router.service import FrontEnd, InferenceService

_Ending = Callable[[], Awaitable[None]]
#: Begins to generate.
Start = Callable[[], AbstractAsyncContextManager[RequestRun]]

#: OpenAI's: requests a minute, those left, and when the next of those made no longer counts.
RATE_HEADERS = tuple(
    b"x-ratelimit-" + what + b"-requests" for what in (b"limit", b"remaining", b"reset")
)
#: Where a connection's scope has its Caller.
CALLER = "baton.caller"


class StreamWriter(Protocol):
    """Writes the server-sent events of one answer."""

    def events(self, deltas: Sequence[Delta]) -> bytes: ...

    def last(self) -> bytes: ...

    def failed(self, error: BatonError) -> bytes:
        """The last event of a stream that fails."""


class ApiExchange(Protocol):
    """One request in the form of one API, and the answers to it."""

    @property
    def request(self) -> GenerateRequest: ...

    def stream(self, run: RequestRun) -> StreamWriter: ...

    def whole(self, run: RequestRun, deltas: Sequence[Delta]) -> bytes: ...

    def detached(self, start: Start, request_id: RequestId, arrival: float) -> bytes | None:
        """The answer to a request that goes on without its connection; None for others."""

    def named(self, error: BatonError) -> BatonError:
        """An error about the request, in the words of this API."""


@dataclass(frozen=True, slots=True)
class HttpCall:
    """Who calls, what the call is known by, and the list for the names of fields that are left out;
    None when they are to be refused."""

    caller: Caller
    request_id: RequestId
    ignored: list[str] | None


@dataclass(frozen=True, slots=True)
class HttpApi:
    """An API that generates: the label of its metrics, the type of its bodies, what makes an
    exchange of one and what completes that. Large bodies are parsed and begun in threads."""

    endpoint: str
    body: type[Any]
    begin: Callable[[HttpCall, Any], ApiExchange]
    complete: Callable[[Any], Awaitable[None]] | None = None


class HttpPaths:
    """Generates, for every API."""

    def __init__(self, service: InferenceService, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies

    async def generate(
        self, api: HttpApi, scope: Scope, receive: Receive, answer: HttpAnswer
    ) -> None:
        arrival, request_id = self._service.clock(), request_id_of(scope)
        headers, caller = Headers(scope=scope), caller_of(scope)
        with self._service.track(FrontEnd.HTTP, api.endpoint, request_id):

            def begin(body: Any, ignored: list[str] | None) -> ApiExchange:
                call = HttpCall(caller=caller, request_id=request_id, ignored=ignored)
                return api.begin(call, body)

            exchange = await self._bodies.request(scope, receive, answer, api.body, begin)
            with self._refusals(exchange, answer, caller):
                if api.complete is not None:
                    await api.complete(exchange)
                start = partial(
                    self._service.generate,
                    exchange.request,
                    request_id=request_id,
                    caller=caller,
                    arrival=arrival,
                    trace=parse_trace(headers.get("traceparent"), headers.get("tracestate")),
                )
                detached = exchange.detached(start, request_id, arrival)
                if detached is None:
                    async with cancelled_when_gone(receive), start() as run:
                        answer.headers += self._rate_headers(caller)
                        ending = await self._relay(exchange, run, answer)
                else:
                    ending = partial(answer.whole, 200, detached, [JSON_TYPE])
        await answer.ended(ending)

    @contextmanager
    def _refusals(
        self, exchange: ApiExchange, answer: HttpAnswer, caller: Caller
    ) -> Iterator[None]:
        """Name errors in the words of the API, and say when the caller may try again."""
        try:
            yield
        except Overloaded as error:
            if not answer.started:
                rates = self._rate_headers(caller)
                answer.headers += [pair for pair in rates if pair not in answer.headers]
            raise exchange.named(error) from None
        except BatonError as error:
            raise exchange.named(error) from error.__cause__

    def _rate_headers(self, caller: Caller) -> HeaderList:
        """OpenAI's headers about the caller's limit of requests a minute, if it has one."""
        if (rate := self._service.limits.rate(caller)) is None:
            return []
        values = b"%d" % rate.limit, b"%d" % rate.remaining, f"{rate.reset_s:.3g}s".encode()
        return list(zip(RATE_HEADERS, values, strict=True))

    async def _relay(self, exchange: ApiExchange, run: RequestRun, answer: HttpAnswer) -> _Ending:
        """Send the output, and return what sends its end. That is called after the request stopped
        counting: a client with a complete answer can send its next request at once."""
        headers = [(b"baton-request-id", run.request_id.encode())]
        request = exchange.request
        if request.stream:
            writer, scored = exchange.stream(run), request.scored
            async for deltas in run:
                # The status line waits for the first token: earlier failures keep their own.
                if not answer.started:
                    answer.failed = writer.failed
                    await answer.begin_stream(headers)
                size = sum(delta.num_scores for delta in deltas) if scored else 0
                await answer.part(await off_loop(partial(writer.events, deltas), size=size))
            return partial(answer.part, writer.last(), last=True)
        whole = [delta async for deltas in run for delta in deltas]
        write = partial(exchange.whole, run, whole)
        body = await off_loop(write, size=sum(delta.num_scores for delta in whole))
        return partial(answer.whole, 200, body, [JSON_TYPE, *headers])


def caller_of(scope: Scope) -> Caller:
    caller: Caller = scope.get(CALLER, ANYONE)
    return caller
