"""Lets nobody past without a key, on every path but those that probes and scrapers need."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.errors import BatonError
from protocol.timeline import TraceContext, parse_trace
from router.auth.keys import ANYONE, Caller, KeyFile
from router.openai.answers import HttpAnswer

PUBLIC = frozenset({"/health", "/ready", "/metrics", "/metrics/targets"})
_CALLER = "baton.caller"


def guarded(app: ASGIApp, access: KeyFile) -> ASGIApp:
    """`app`, which finds the caller with `caller_of`, for those with a key; the others get 401."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PUBLIC:
            try:
                scope[_CALLER] = access.caller(Headers(scope=scope).get("authorization"))
            except BatonError as error:
                await HttpAnswer(scope, send).error(error)
                return
        await app(scope, receive, send)

    return serve


def caller_of(scope: Scope) -> Caller:
    """Who sent a request that passed the guard."""
    caller: Caller = scope.get(_CALLER, ANYONE)
    return caller


def trace_of(scope: Scope) -> TraceContext | None:
    """Where the client says a request stands in its trace."""
    headers = Headers(scope=scope)
    return parse_trace(headers.get("traceparent"), headers.get("tracestate"))
