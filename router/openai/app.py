"""The paths of the HTTP front end (made by router.server), and who may call them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
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
from router.anthropic.answers import MessagesExchange
from router.anthropic.errors import error_body as messages_error
from router.anthropic.request import MessagesRequest
from router.auth.keys import KeyFile
from router.config import RouterConfig
from router.fingerprint import baton_version
from router.openai.chunks import OpenAiExchange
from router.openai.document import openapi_document
from router.openai.errors import error_body, error_headers, error_status
from router.openai.exchange import IGNORED_FIELDS, BodyReader, HttpAnswer
from router.openai.lookups import Lookups, json_response
from router.openai.paths import CALLER, RATE_HEADERS, HttpApi, HttpCall, HttpPaths
from router.openai.server import request_id_of
from router.openai.stored import StoredResponses
from router.pages import PAGES, page
from router.request.generate_request import REQUEST_ID, GenerateRequest, RequestKind
from router.request.parse import REQUESTS
from router.responses.shared import SharedResponses
from router.served_model import ServedModel
from router.service import InferenceService

MetricsText = Callable[[], Awaitable[bytes]]
_Serve = Callable[[Scope, Receive, HttpAnswer], Awaitable[None]]
_ENDPOINTS = {
    RequestKind.CHAT: "chat_completions",
    RequestKind.COMPLETION: "completions",
}
#: Where answers have the form of Anthropic's API.
_MESSAGES = "/v1/messages"
#: Paths that need no key: probes and scrapers have none.
METRICS_PATHS = frozenset({"/metrics", "/metrics/targets"})
PUBLIC_PATHS = METRICS_PATHS | {"/health", "/ready", *PAGES}
#: Headers of answers that pages of other origins may read.
_EXPOSED = (
    *("baton-request-id", IGNORED_FIELDS.decode(), "retry-after", REQUEST_ID, "request-id"),
    *(name.decode() for name in RATE_HEADERS),
)
#: How long browsers cache what a page may send.
_CORS_AGE_S = 3600
#: Paths of OpenAI's API that clients know and that are not served.
_NOT_SERVED = {
    "/v1/conversations": "continue responses by previous_response_id",
    "/v1/embeddings": "models here generate text",
    "/v1/moderations": "models here generate text",
    "/v1/images": "models here generate text",
    "/v1/audio": "models here generate text",
    "/v1/files": "send requests one by one",
    "/v1/batches": "send requests one by one",
    "/v1/messages/batches": "send requests one by one",
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
    responses: SharedResponses,
) -> ASGIApp:
    """The ASGI application. `metrics_text` renders /metrics, `metrics_targets` lists the addresses
    where each router serves its own; /openapi.json describes `model`."""
    pages = PAGES if config.pages_enabled else {}
    document = openapi_document(
        version=baton_version(),
        names=sorted(model.names),
        context=model.context,
        vocab_size=model.text.vocab_size,
        strict=config.strict_requests,
    )

    async def serve_targets(_: Request) -> Response:
        # https://prometheus.io/docs/prometheus/latest/http_sd/
        return json_response([{"targets": list(metrics_targets()), "labels": {}}])

    routes = [
        *_api_routes(service, config, responses),
        *(Route(path, page(name)) for path, name in pages.items()),
        Route("/health", _constant({"status": "ok"})),  # the event loop turns
        Route("/metrics", _metrics(metrics_text)),
        Route("/metrics/targets", serve_targets),
        Route("/version", _constant({"version": baton_version()})),
        Route("/openapi.json", _constant(document)),
    ]
    paths = Starlette(routes=routes, exception_handlers=_HANDLERS)
    paths.router.redirect_slashes = False  # behind a proxy they would lead past it
    public = PUBLIC_PATHS - METRICS_PATHS if config.metrics_need_key else PUBLIC_PATHS
    app: ASGIApp = _guarded(paths, access, public)
    if not config.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        max_age=_CORS_AGE_S,
    )


def _api_routes(
    service: InferenceService, config: RouterConfig, responses: SharedResponses
) -> Iterator[Route]:
    """What clients call: every API, and readiness."""
    bodies = BodyReader(config.max_body_bytes, strict=config.strict_requests)
    front_end, lookups = HttpPaths(service, bodies), Lookups(service, bodies)
    stored = StoredResponses(service, bodies, responses)
    posts: dict[str, _Serve] = {
        "/v1/chat/completions": partial(front_end.generate, _openai(service, RequestKind.CHAT)),
        "/v1/completions": partial(front_end.generate, _openai(service, RequestKind.COMPLETION)),
        "/v1/responses": partial(front_end.generate, stored.api),
        "/v1/responses/input_tokens": stored.input_tokens,
        "/v1/messages": partial(front_end.generate, _messages(service)),
        "/v1/messages/count_tokens": lookups.count_tokens,
        "/tokenize": lookups.tokenize,
        "/detokenize": lookups.detokenize,
    }
    for path, serve in posts.items():
        yield Route(path, _App(serve), methods=("POST",))
    yield Route("/v1/responses/{id}", stored.one, methods=("GET", "DELETE"))
    yield Route("/v1/responses/{id}/cancel", stored.cancel, methods=("POST",))
    yield Route("/v1/responses/{id}/input_items", stored.items)
    yield Route("/v1/models", lookups.models)
    yield Route("/v1/models/{model:path}", lookups.model)
    yield Route("/ready", lookups.ready)


def _openai(service: InferenceService, kind: RequestKind) -> HttpApi:
    def begin(_: HttpCall, request: GenerateRequest) -> OpenAiExchange:
        return OpenAiExchange(request, service.model_named)

    return HttpApi(_ENDPOINTS[kind], REQUESTS[kind], begin)


def _messages(service: InferenceService) -> HttpApi:
    def begin(call: HttpCall, request: MessagesRequest) -> MessagesExchange:
        return MessagesExchange(request, service.model_named, call.request_id.name)

    return HttpApi("messages", MessagesRequest, begin)


def _answer(scope: Scope, send: Send) -> HttpAnswer:
    """An answer whose errors have the form of the path's API."""
    if not scope["path"].startswith(_MESSAGES):
        return HttpAnswer(scope, send)
    name = request_id_of(scope).name
    answer = HttpAnswer(scope, send, partial(messages_error, request_id=name))
    answer.headers.append((b"request-id", name.encode()))
    return answer


def _guarded(app: ASGIApp, keys: KeyFile, public: Container[str]) -> ASGIApp:
    """`app` for callers with a key, in OpenAI's header or in Anthropic's; others get 401, except on
    the `public` paths, which probes and scrapers need."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in public:
            headers = Headers(scope=scope)
            key, given = headers.get("x-api-key"), headers.get("authorization")
            try:
                scope[CALLER] = keys.caller(given or (key and f"Bearer {key}"))
            except BatonError as error:
                await _answer(scope, send).error(error)
                return
        await app(scope, receive, send)

    return serve


def make_metrics_app(
    metrics_text: MetricsText, *, config: RouterConfig, access: KeyFile
) -> ASGIApp:
    """/metrics and nothing else: of one router, where several share the API's port."""
    app = Starlette(
        routes=[Route("/metrics", _metrics(metrics_text))], exception_handlers=_HANDLERS
    )
    return _guarded(app, access, () if config.metrics_need_key else METRICS_PATHS)


class _App:
    """An ASGI application as Starlette recognises one: not a function or method. Answers errors."""

    def __init__(self, serve: _Serve) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _answer(scope, send)
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


def _error(request: Request, error: BatonError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    if request.url.path.startswith(_MESSAGES):
        body = messages_error(error, request_id_of(request.scope).name)
    else:
        body = error_body(error)
    return Response(
        body,
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
                return _error(request, NotFound(f"{known} is not served here: {instead}"))
        served = {route.path for route in request.app.routes}
        hint = f"; did you mean /v1{path}?" if f"/v1{path}" in served else ""
        return _error(request, NotFound(f"unknown path: {path}{hint}"))
    allowed = (error.headers or {}).get("Allow", "")
    fault = InvalidRequest(f"{request.method} is not allowed here, only {allowed}")
    response = _error(request, fault)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _exception(request: Request, error: Exception) -> Response:
    return _error(request, typed(error))


_HANDLERS: dict[Any, Any] = {
    HTTPException: _http_exception,
    BatonError: _exception,
    Exception: _exception,
}
