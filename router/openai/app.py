"""The paths of the HTTP front end (made by router.server), and who may call them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
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
from protocol.errors import BatonError, InvalidRequest, NotFound, typed
from router.auth.keys import Caller, KeyFile
from router.config import RouterConfig
from router.openai.chunks import OpenAiExchange
from router.openai.document import openapi_document
from router.openai.errors import error_body, error_headers, error_status
from router.openai.exchange import IGNORED_FIELDS, HttpAnswer
from router.openai.paths import CALLER, HttpApi, HttpPaths, json_response
from router.request.generate_request import REQUEST_ID, GenerateRequest, RequestKind
from router.request.parse import REQUESTS
from router.served_model import ServedModel, baton_version
from router.service import InferenceService

MetricsText = Callable[[], Awaitable[bytes]]
_Serve = Callable[[Scope, Receive, HttpAnswer], Awaitable[None]]
_ENDPOINTS = {
    RequestKind.CHAT: "chat_completions",
    RequestKind.COMPLETION: "completions",
}
#: Paths that need no key: probes and scrapers have none.
PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics", "/metrics/targets"})
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
    config: RouterConfig,
    access: KeyFile,
    metrics_text: MetricsText,
    model: ServedModel,
    metrics_targets: Callable[[], Sequence[str]],
) -> ASGIApp:
    """The ASGI application. `metrics_text` renders /metrics, `metrics_targets` lists the addresses
    where each router serves its own; /openapi.json describes `model`."""
    strict = config.strict_requests
    front_end = HttpPaths(service, config.max_body_bytes, strict=strict)
    document = openapi_document(
        version=baton_version(),
        names=sorted(model.names),
        context=model.context,
        vocab_size=model.text.vocab_size,
        strict=strict,
    )

    async def serve_targets(_: Request) -> Response:
        # https://prometheus.io/docs/prometheus/latest/http_sd/
        return json_response([{"targets": list(metrics_targets()), "labels": {}}])

    posts: dict[str, _Serve] = {
        "/v1/chat/completions": partial(front_end.generate, _openai(service, RequestKind.CHAT)),
        "/v1/completions": partial(front_end.generate, _openai(service, RequestKind.COMPLETION)),
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
        Route("/version", _constant({"version": baton_version()})),
        Route("/openapi.json", _constant(document)),
    ]
    paths = Starlette(routes=routes, exception_handlers=_HANDLERS)
    paths.router.redirect_slashes = False  # behind a proxy they would lead past it
    app: ASGIApp = _guarded(paths, access)
    if not config.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["baton-request-id", IGNORED_FIELDS.decode(), "retry-after", REQUEST_ID],
        max_age=_CORS_AGE_S,
    )


def _openai(service: InferenceService, kind: RequestKind) -> HttpApi:
    def begin(request: GenerateRequest, _caller: Caller, _ignored: list[str]) -> OpenAiExchange:
        return OpenAiExchange(request, service.model_info)

    return HttpApi(_ENDPOINTS[kind], REQUESTS[kind], begin)


def _guarded(app: ASGIApp, keys: KeyFile) -> ASGIApp:
    """`app` for callers with a key, in OpenAI's header or in Anthropic's; others get 401, except on
    the paths that probes and scrapers need."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PUBLIC_PATHS:
            headers = Headers(scope=scope)
            key, given = headers.get("x-api-key"), headers.get("authorization")
            try:
                scope[CALLER] = keys.caller(given or (key and f"Bearer {key}"))
            except BatonError as error:
                await HttpAnswer(scope, send).error(error)
                return
        await app(scope, receive, send)

    return serve


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


def _constant(value: dict[str, Any]) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return json_response(value)

    return serve


def _metrics(metrics_text: MetricsText) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return Response(await metrics_text(), headers={"content-type": CONTENT_TYPE})

    return serve


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
