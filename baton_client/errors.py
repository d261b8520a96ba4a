"""The error of a call."""

from __future__ import annotations

from typing import Any

import grpc


class CallError(Exception):
    """A call that failed.

    status: gRPC's code. code: the router's own, such as `overloaded` or `context_length_exceeded`;
    empty when no router answered. param: the field at fault. retry_after_s: when the router may
    accept it. request_id: how logs call the request. token_ids, text: the output so far.
    """

    def __init__(
        self,
        message: str,
        *,
        status: grpc.StatusCode,
        code: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.token_ids: tuple[int, ...] = ()
        self.text = ""

    def __str__(self) -> str:
        return f"{self.code or self.status.name}: {super().__str__()}"


def call_error(error: Any, address: str) -> CallError:
    """The typed error of a grpc.RpcError: the router names code and field in trailers."""
    trailers = dict(error.trailing_metadata() or ())
    status = error.code() or grpc.StatusCode.UNKNOWN
    message = error.details() or status.name
    if status is grpc.StatusCode.UNAVAILABLE and "baton-error-code" not in trailers:
        message = f"{address}: {message}"
    return CallError(
        message,
        status=status,
        code=str(trailers.get("baton-error-code", "")),
        param=_text(trailers.get("baton-error-param")),
        retry_after_s=_seconds(trailers.get("retry-after")),
        request_id=_text(trailers.get("x-request-id")) or "",
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _seconds(value: object) -> float | None:
    try:
        return None if value is None else max(0.0, float(str(value)))
    except ValueError:
        return None
