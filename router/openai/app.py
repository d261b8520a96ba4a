"""The paths of the HTTP door."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from observability.export import CONTENT_TYPE
from protocol.errors import BatonError, Internal, InvalidRequest, NotFound, Unavailable
from router.access import Access
from router.generation import Generation
from router.keys import Caller
from router.large import off_loop
from router.model import ModelInfo, ServedModel
from router.openai.answers import JSON_TYPE, Answer, cancelled_when_gone
from router.openai.body import read_object
from router.openai.chunks import ChunkWriter, Collector
from router.openai.document import openapi_document
from router.openai.errors import error_body, error_headers, error_status
from router.openai.guard import Guard, caller_of, trace_of
from router.request import GenerateRequest, RequestKind, parse_request
from router.service import Door, InferenceService

_Ending = Callable[[], Awaitable[None]]
#: How long browsers remember what they may.
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
_Operation = Callable[[dict[str, Any], Caller], Awaitable[dict[str, Any]]]


def make_app(
    service: InferenceService,
    *,
    access: Access,
    metrics_text: Callable[[], Awaitable[bytes]],
    max_body_bytes: int,
    model: ServedModel,
    metrics_targets: Callable[[], Sequence[str]],
    cors_origins: Sequence[str] = (),
) -> ASGIApp:
    """The ASGI application. `metrics_text` renders /metrics, `metrics_targets` names where each
    router has its own; `model` is what /openapi.json is about; pages of `cors_origins` may call."""
    door = _Paths(service, metrics_text, max_body_bytes)
    document = openapi_document(
        version=_version(),
        names=sorted(model.names),
        context=model.context,
        vocab_size=model.vocab_size,
    )

    async def serve_document(_: Request) -> Response:
        return _json(document)

    async def serve_targets(_: Request) -> Response:
        # https://prometheus.io/docs/prometheus/latest/http_sd/
        return JSONResponse([{"targets": list(metrics_targets()), "labels": {}}])

    routes = [
        Route("/v1/chat/completions", door.generate(RequestKind.CHAT), methods=["POST"]),
        Route("/v1/completions", door.generate(RequestKind.COMPLETION), methods=["POST"]),
        Route("/v1/models", door.models, methods=["GET"]),
        Route("/v1/models/{model:path}", door.model, methods=["GET"]),
        Route("/tokenize", door.operation(door.tokenize), methods=["POST"]),
        Route("/detokenize", door.operation(door.detokenize), methods=["POST"]),
        Route("/health", door.health, methods=["GET"]),
        Route("/ready", door.ready, methods=["GET"]),
        Route("/metrics", door.metrics, methods=["GET"]),
        Route("/metrics/targets", serve_targets, methods=["GET"]),
        Route("/version", door.version, methods=["GET"]),
        Route("/openapi.json", serve_document, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_exception, Exception: _exception}
    paths = Starlette(routes=routes, exception_handlers=handlers)
    paths.router.redirect_slashes = False  # behind a proxy they would lead past it
    app: ASGIApp = Guard(paths, access)
    if not cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["baton-request-id", "retry-after"],
        max_age=_CORS_AGE_S,
    )


def make_metrics_app(metrics_text: Callable[[], Awaitable[bytes]]) -> ASGIApp:
    """/metrics and nothing else: of one router, where several share the port of the doors."""

    async def serve(_: Request) -> Response:
        return await _metrics(metrics_text)

    handlers: dict[Any, Any] = {HTTPException: _http_exception, Exception: _exception}
    return Starlette(routes=[Route("/metrics", serve)], exception_handlers=handlers)


async def _metrics(metrics_text: Callable[[], Awaitable[bytes]]) -> Response:
    return Response(await metrics_text(), headers={"content-type": CONTENT_TYPE})


class _Paths:
    def __init__(
        self,
        service: InferenceService,
        metrics_text: Callable[[], Awaitable[bytes]],
        max_body_bytes: int,
    ) -> None:
        self._service = service
        self._metrics_text = metrics_text
        self._max_body_bytes = max_body_bytes
        self._version = _version()

    # --- generate ---------------------------------------------------------------------------------

    def generate(self, kind: RequestKind) -> ASGIApp:
        """The endpoint of one kind of request, as a plain ASGI application."""
        endpoint = "chat_completions" if kind is RequestKind.CHAT else "completions"

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            arrival = self._service.clock()
            answer = Answer(scope, send)
            try:
                with self._service.track(Door.HTTP, endpoint):
                    fields = await read_object(scope, receive, limit=self._max_body_bytes)
                    request = parse_request(kind, fields)
                    async with (
                        cancelled_when_gone(receive),
                        self._service.generate(
                            request,
                            caller=caller_of(scope),
                            arrival=arrival,
                            trace=trace_of(scope),
                        ) as generation,
                    ):
                        ending = await self._relay(request, generation, answer)
                await answer.ended(ending)
            except BatonError as error:
                await answer.error(error)

        return _AsgiEndpoint(run)

    async def _relay(
        self, request: GenerateRequest, generation: Generation, answer: Answer
    ) -> _Ending:
        """Pass the output on; what is left to send once the request is off the books. Until then a
        client that got its answer could still be refused for what it had in flight."""
        headers = [(b"baton-request-id", generation.request_id.encode())]
        model = self._service.model_name
        if request.stream:
            writer = ChunkWriter(request, generation, model=model)
            async for deltas in generation:
                # The status line waits for the first token: earlier failures keep their own.
                if not answer.started:
                    await answer.begin_stream(headers)
                size = sum(delta.num_scores for delta in deltas) if request.scored else 0
                await answer.part(await off_loop(partial(writer.events, deltas), size=size))
            return partial(answer.part, writer.last(), last=True)
        collector = Collector(request, generation, model=model)
        async for deltas in generation:
            collector.add(deltas)
        body = await off_loop(collector.body, size=collector.num_scores)
        return partial(answer.whole, 200, body, [JSON_TYPE, *headers])

    # --- the rest ---------------------------------------------------------------------------------

    def operation(self, run_operation: _Operation) -> ASGIApp:
        """The endpoint of an operation from one JSON object to another."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            answer = Answer(scope, send)
            try:
                fields = await read_object(scope, receive, limit=self._max_body_bytes)
                await answer.object(await run_operation(fields, caller_of(scope)))
            except BatonError as error:
                await answer.error(error)

        return _AsgiEndpoint(run)

    async def tokenize(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """POST /tokenize: `prompt` or `messages` to ids."""
        tokens = await self._service.tokenize(fields, caller)
        return {
            "count": len(tokens.ids),
            "max_model_len": tokens.max_model_len,
            "tokens": tokens.ids,
        }

    async def detokenize(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """POST /detokenize: `tokens` to text."""
        return {"prompt": await self._service.detokenize(fields, caller)}

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        served = self._service.models(caller_of(request.scope))
        data = [_model_json(model) for model in served]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        try:
            name, caller = request.path_params["model"], caller_of(request.scope)
            return _json(_model_json(self._service.find_model(name, caller)))
        except BatonError as error:
            return _error(error)

    async def health(self, _: Request) -> Response:
        """GET /health: this process is alive and its event loop turns."""
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """GET /ready: a request would be accepted now."""
        if self._service.ready:
            return _json({"status": "ready"})
        state = "draining" if self._service.admission.draining else "no decode worker is ready"
        return _error(Unavailable(f"not ready: {state}", retry_after_s=1))

    async def metrics(self, _: Request) -> Response:
        """GET /metrics, in Prometheus' text format."""
        return await _metrics(self._metrics_text)

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return _json({"version": self._version})


class _AsgiEndpoint:
    """Tells Starlette that this is an application, not a function of a request."""

    def __init__(self, run: ASGIApp) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(scope, receive, send)


def _model_json(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "max_model_len": model.max_model_len,
    }


def _json(value: dict[str, Any]) -> Response:
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
    return _error(Internal(f"{type(error).__name__}: {error}"))


def _version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "unknown"
