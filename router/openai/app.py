"""The paths of the HTTP API, each in a few lines over router.service (made by router.server)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from observability.export import CONTENT_TYPE
from protocol.errors import BatonError, InvalidRequest, NotFound, Unavailable, typed
from protocol.timeline import parse_trace
from router.auth.keys import ANYONE, Caller, KeyFile
from router.dispatch.request_run import RequestRun
from router.offload import off_loop
from router.openai.chunks import ChunkWriter
from router.openai.chunks import answer as answer_bytes
from router.openai.document import openapi_document
from router.openai.errors import JSON_TYPE, error_body, error_headers, error_status
from router.openai.exchange import BodyReader, HttpAnswer, cancelled_when_gone
from router.openai.server import request_id_of
from router.request.endpoints import DetokenizeRequest, TokenizeRequest
from router.request.generate_request import REQUEST_ID, GenerateRequest, RequestKind
from router.request.parse import REQUESTS
from router.served_model import ModelInfo, ServedModel
from router.service import FrontEnd, InferenceService

MetricsText = Callable[[], Awaitable[bytes]]
_Serve = Callable[[Scope, Receive, HttpAnswer], Awaitable[None]]
_Ending = Callable[[], Awaitable[None]]
_ENDPOINTS = {
    RequestKind.CHAT: "chat_completions",
    RequestKind.COMPLETION: "completions",
}
#: Paths that need no key: probes and scrapers have none.
PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics", "/metrics/targets"})
_CALLER = "baton.caller"
#: How long browsers cache what a page may send.
_CORS_AGE_S = 3600
#: Paths of OpenAI's API that clients know and that are not served.
_NOT_SERVED = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/embeddings": "models here generate text",
    "/v1/moderations": "models here generate text",
    "/v1/images": "models here generate text",
    "/v1/audio": "models here generate text",
    "/v1/files": "send requests one by one",
    "/v1/batches": "send requests one by one",
    "/v1/fine_tuning": "models are served as they are",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
}


def make_app(
    service: InferenceService,
    *,
    access: KeyFile,
    metrics_text: MetricsText,
    max_body_bytes: int,
    model: ServedModel,
    metrics_targets: Callable[[], Sequence[str]],
    cors_origins: Sequence[str] = (),
) -> ASGIApp:
    """The ASGI application. `metrics_text` renders /metrics, `metrics_targets` lists the addresses
    where each router serves its own; /openapi.json describes `model`; browsers may call from
    `cors_origins`."""
    front_end = _HttpPaths(service, max_body_bytes)
    document = openapi_document(
        version=_version(),
        names=sorted(model.names),
        context=model.context,
        vocab_size=model.text.vocab_size,
    )

    async def serve_targets(_: Request) -> Response:
        # https://prometheus.io/docs/prometheus/latest/http_sd/
        return _json([{"targets": list(metrics_targets()), "labels": {}}])

    posts: dict[str, _Serve] = {
        "/v1/chat/completions": partial(front_end.generate, RequestKind.CHAT),
        "/v1/completions": partial(front_end.generate, RequestKind.COMPLETION),
        "/tokenize": front_end.tokenize,
        "/detokenize": front_end.detokenize,
    }
    routes = [
        *(Route(path, _App(serve), methods=("POST",)) for path, serve in posts.items()),
        Route("/v1/models", front_end.models),
        Route("/v1/models/{model:path}", front_end.model),
        Route("/health", _constant({"status": "ok"})),  # the event loop turns
        Route("/ready", front_end.ready),
        Route("/metrics", _metrics(metrics_text)),
        Route("/metrics/targets", serve_targets),
        Route("/version", _constant({"version": _version()})),
        Route("/openapi.json", _constant(document)),
    ]
    paths = Starlette(routes=routes, exception_handlers=_HANDLERS)
    paths.router.redirect_slashes = False  # behind a proxy they would lead past it
    app: ASGIApp = _guarded(paths, access)
    if not cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["baton-request-id", "retry-after", REQUEST_ID],
        max_age=_CORS_AGE_S,
    )


def _guarded(app: ASGIApp, keys: KeyFile) -> ASGIApp:
    """`app` for callers with a key; others get 401, except on the paths that probes and scrapers
    need."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PUBLIC_PATHS:
            try:
                scope[_CALLER] = keys.caller(Headers(scope=scope).get("authorization"))
            except BatonError as error:
                await HttpAnswer(scope, send).error(error)
                return
        await app(scope, receive, send)

    return serve


def _caller(scope: Scope) -> Caller:
    caller: Caller = scope.get(_CALLER, ANYONE)
    return caller


def make_metrics_app(metrics_text: MetricsText) -> ASGIApp:
    """/metrics and nothing else: of one router, where several share the API's port."""
    return Starlette(
        routes=[Route("/metrics", _metrics(metrics_text))], exception_handlers=_HANDLERS
    )


class _App:
    """An ASGI application as Starlette recognises one: not a function or method. Answers errors."""

    def __init__(self, serve: _Serve) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = HttpAnswer(scope, send)
        try:
            await self._serve(scope, receive, answer)
        except BatonError as error:
            await answer.error(error)


class _HttpPaths:
    def __init__(self, service: InferenceService, max_body_bytes: int) -> None:
        self._service = service
        self._bodies = BodyReader(max_body_bytes)

    async def generate(
        self, kind: RequestKind, scope: Scope, receive: Receive, answer: HttpAnswer
    ) -> None:
        arrival, request_id = self._service.clock(), request_id_of(scope)
        headers = Headers(scope=scope)
        with self._service.track(FrontEnd.HTTP, _ENDPOINTS[kind], request_id):
            request = await self._bodies.read(scope, receive, REQUESTS[kind])
            async with (
                cancelled_when_gone(receive),
                self._service.generate(
                    request,
                    request_id=request_id,
                    caller=_caller(scope),
                    arrival=arrival,
                    trace=parse_trace(headers.get("traceparent"), headers.get("tracestate")),
                ) as run,
            ):
                ending = await self._relay(request, run, answer)
        await answer.ended(ending)

    async def _relay(
        self, request: GenerateRequest, run: RequestRun, answer: HttpAnswer
    ) -> _Ending:
        """Send the output, and return what sends its end. That is called after the request stopped
        counting: a client with a complete answer can send its next request at once."""
        headers = [(b"baton-request-id", run.request_id.encode())]
        model = self._service.model_name
        if request.stream:
            writer, scored = ChunkWriter(request, run, model=model), request.scored
            async for deltas in run:
                # The status line waits for the first token: earlier failures keep their own.
                if not answer.started:
                    await answer.begin_stream(headers)
                size = sum(delta.num_scores for delta in deltas) if scored else 0
                await answer.part(await off_loop(partial(writer.events, deltas), size=size))
            return partial(answer.part, writer.last(), last=True)
        whole = [delta async for deltas in run for delta in deltas]
        write = partial(answer_bytes, request, run, whole, model=model)
        body = await off_loop(write, size=sum(delta.num_scores for delta in whole))
        return partial(answer.whole, 200, body, [JSON_TYPE, *headers])

    async def tokenize(self, scope: Scope, receive: Receive, answer: HttpAnswer) -> None:
        request = await self._bodies.read(scope, receive, TokenizeRequest)
        tokens = await self._service.tokenize(request, _caller(scope))
        counts = {"count": len(tokens.ids), "max_model_len": tokens.max_model_len}
        await answer.object(counts | {"tokens": tokens.ids}, size=len(tokens.ids))

    async def detokenize(self, scope: Scope, receive: Receive, answer: HttpAnswer) -> None:
        request = await self._bodies.read(scope, receive, DetokenizeRequest)
        text = await self._service.detokenize(request, _caller(scope))
        await answer.object({"prompt": text}, size=len(text))

    async def models(self, request: Request) -> Response:
        served = self._service.models(_caller(request.scope))
        return _json({"object": "list", "data": list(map(_model_json, served))})

    async def model(self, request: Request) -> Response:
        name, caller = request.path_params["model"], _caller(request.scope)
        return _json(_model_json(self._service.find_model(name, caller)))

    async def ready(self, _: Request) -> Response:
        if self._service.ready:
            return _json({"status": "ready"})
        state = "draining" if self._service.limits.draining else "no decode worker is ready"
        raise Unavailable(f"not ready: {state}", retry_after_s=1)


def _constant(value: dict[str, Any]) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return _json(value)

    return serve


def _metrics(metrics_text: MetricsText) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return Response(await metrics_text(), headers={"content-type": CONTENT_TYPE})

    return serve


def _model_json(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "max_model_len": model.max_model_len,
    }


def _json(value: object) -> Response:
    return Response(json.dumps(value).encode(), media_type="application/json")


def _error(error: BatonError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(
        error_body(error),
        status_code=error_status(error),
        headers=headers,
        media_type="application/json",
    )


async def _http_exception(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods, in the same form as every other error."""
    if error.status_code == HTTPStatus.NOT_FOUND:
        path = request.url.path
        for known, instead in _NOT_SERVED.items():
            if path == known or path.startswith(known + "/"):
                return _error(NotFound(f"{known} is not served here: {instead}"))
        return _error(NotFound(f"unknown path: {path}"))
    allowed = (error.headers or {}).get("Allow", "")
    response = _error(InvalidRequest(f"{request.method} is not allowed here, only {allowed}"))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _exception(_: Request, error: Exception) -> Response:
    return _error(typed(error))


_HANDLERS: dict[Any, Any] = {
    HTTPException: _http_exception,
    BatonError: _exception,
    Exception: _exception,
}


def _version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "unknown"
