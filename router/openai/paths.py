"""The operations of the HTTP front end, for every API whose form it speaks."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from protocol.errors import BatonError, Overloaded, Unavailable
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
    ignored_header,
)
from router.openai.server import request_id_of
from router.request.body import Body
from router.request.endpoints import DetokenizeRequest, TokenizeRequest
from router.request.generate_request import GenerateRequest
from router.served_model import ModelInfo
from router.service import FrontEnd, InferenceService

R = TypeVar("R", bound=Body)
_Ending = Callable[[], Awaitable[None]]

#: Where a connection's scope has its Caller.
CALLER = "baton.caller"


class StreamWriter(Protocol):
    """Writes the server-sent events of one answer."""

    def events(self, deltas: Sequence[Delta]) -> bytes: ...

    def last(self) -> bytes: ...


class ApiExchange(Protocol):
    """One request in the form of one API, and the answers to it."""

    request: GenerateRequest

    def stream(self, run: RequestRun) -> StreamWriter: ...

    def whole(self, run: RequestRun, deltas: Sequence[Delta]) -> bytes: ...

    def failed(self, error: BatonError) -> bytes:
        """The last event of a stream that fails."""

    def named(self, error: BatonError) -> BatonError:
        """An error about the request, in the words of this API."""


@dataclass(frozen=True, slots=True)
class HttpApi:
    """An API that generates: the label of its metrics, the type of its bodies, and what makes an
    ApiExchange of one, with the list for names of fields that are left out."""

    endpoint: str
    body: type[Any]
    begin: Callable[[Any, Caller, list[str]], ApiExchange]


class HttpPaths:
    """Generate, Tokenize, Detokenize, the models and readiness. With `strict`, fields that are
    unknown or without effect are refused."""

    def __init__(self, service: InferenceService, max_body_bytes: int, *, strict: bool) -> None:
        self._service = service
        self._bodies = BodyReader(max_body_bytes)
        self._strict = strict

    async def generate(
        self, api: HttpApi, scope: Scope, receive: Receive, answer: HttpAnswer
    ) -> None:
        arrival, request_id = self._service.clock(), request_id_of(scope)
        headers, caller = Headers(scope=scope), caller_of(scope)
        with self._service.track(FrontEnd.HTTP, api.endpoint, request_id):
            body, ignored = await self._body(scope, receive, api.body)
            exchange = api.begin(body, caller, ignored)
            answer.headers += ignored_header(ignored)
            with self._refusals(exchange, answer, caller):
                async with (
                    cancelled_when_gone(receive),
                    self._service.generate(
                        exchange.request,
                        request_id=request_id,
                        caller=caller,
                        arrival=arrival,
                        trace=parse_trace(headers.get("traceparent"), headers.get("tracestate")),
                    ) as run,
                ):
                    answer.headers += self._rate_headers(caller)
                    ending = await self._relay(exchange, run, answer)
        await answer.ended(ending)

    async def _body(self, scope: Scope, receive: Receive, kind: type[R]) -> tuple[R, list[str]]:
        """The body, and the names of its fields that are left out."""
        ignored: list[str] = []
        body = await self._bodies.read(scope, receive, kind, None if self._strict else ignored)
        return body, ignored

    @contextmanager
    def _refusals(
        self, exchange: ApiExchange, answer: HttpAnswer, caller: Caller
    ) -> Iterator[None]:
        """Name errors in the words of the API, and say when the caller may try again."""
        try:
            yield
        except Overloaded as error:
            if not answer.started:
                answer.headers += self._rate_headers(caller)
            raise exchange.named(error) from None
        except BatonError as error:
            raise exchange.named(error) from error.__cause__

    def _rate_headers(self, caller: Caller) -> HeaderList:
        """OpenAI's headers about the caller's limit of requests a minute, if it has one."""
        rate = self._service.limits.rate(caller)
        if rate is None:
            return []
        return [
            (b"x-ratelimit-limit-requests", b"%d" % rate.limit),
            (b"x-ratelimit-remaining-requests", b"%d" % rate.remaining),
            (b"x-ratelimit-reset-requests", f"{rate.reset_s:.3g}s".encode()),
        ]

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
                    answer.failed = exchange.failed
                    await answer.begin_stream(headers)
                size = sum(delta.num_scores for delta in deltas) if scored else 0
                await answer.part(await off_loop(partial(writer.events, deltas), size=size))
            return partial(answer.part, writer.last(), last=True)
        whole = [delta async for deltas in run for delta in deltas]
        write = partial(exchange.whole, run, whole)
        body = await off_loop(write, size=sum(delta.num_scores for delta in whole))
        return partial(answer.whole, 200, body, [JSON_TYPE, *headers])

    async def tokenize(self, scope: Scope, receive: Receive, answer: HttpAnswer) -> None:
        request, ignored = await self._body(scope, receive, TokenizeRequest)
        answer.headers += ignored_header(ignored)
        tokens = await self._service.tokenize(request, caller_of(scope))
        counts = {"count": len(tokens.ids), "max_model_len": tokens.max_model_len}
        await answer.object(counts | {"tokens": tokens.ids}, size=len(tokens.ids))

    async def detokenize(self, scope: Scope, receive: Receive, answer: HttpAnswer) -> None:
        request, ignored = await self._body(scope, receive, DetokenizeRequest)
        answer.headers += ignored_header(ignored)
        text = await self._service.detokenize(request, caller_of(scope))
        await answer.object({"prompt": text}, size=len(text))

    async def models(self, request: Request) -> Response:
        """One list for OpenAI's clients and Anthropic's."""
        served = list(map(_model_json, self._service.models(caller_of(request.scope))))
        ids = [model["id"] for model in served] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return json_response({"object": "list", "data": served, **ends})

    async def model(self, request: Request) -> Response:
        name, caller = request.path_params["model"], caller_of(request.scope)
        return json_response(_model_json(self._service.find_model(name, caller)))

    async def ready(self, _: Request) -> Response:
        if self._service.ready:
            return json_response({"status": "ready"})
        state = "draining" if self._service.limits.draining else "no decode worker is ready"
        raise Unavailable(f"not ready: {state}", retry_after_s=1)


def caller_of(scope: Scope) -> Caller:
    caller: Caller = scope.get(CALLER, ANYONE)
    return caller


def json_response(value: object) -> Response:
    return Response(json.dumps(value).encode(), media_type="application/json")


def _model_json(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "max_model_len": model.max_model_len,
        # as Anthropic's clients read it
        "type": "model",
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
    }
