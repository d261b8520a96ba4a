"""Errors as OpenAI clients expect them: `{"error": {message, type, param, code}}` and a status."""

from __future__ import annotations

import json
import math

from protocol.errors import STATUSES, BatonError, ErrorCode
from router.errors import presentable

JSON_TYPE = (b"content-type", b"application/json")
_TYPES = {
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.PERMISSION_DENIED: "permission_error",
    ErrorCode.OVERLOADED: "rate_limit_error",
    ErrorCode.UNAVAILABLE: "service_unavailable_error",
    ErrorCode.HANDOFF_FAILED: "service_unavailable_error",
    ErrorCode.DEADLINE_EXCEEDED: "timeout_error",
    ErrorCode.STALE_MESSAGE: "server_error",
    ErrorCode.INTERNAL: "server_error",
}


def error_body(error: BatonError) -> bytes:
    info = presentable(error)
    code = info.code.value
    # The names that OpenAI's clients know.
    if info.code is ErrorCode.NOT_FOUND and info.param == "model":
        code = "model_not_found"
    elif info.code is ErrorCode.UNAUTHENTICATED:
        code = "invalid_api_key"
    fields = {
        "message": info.message,
        "type": _TYPES.get(info.code, "invalid_request_error"),
        "param": info.param,
        "code": code,
    }
    return json.dumps({"error": fields}).encode()


def error_status(error: BatonError) -> int:
    return STATUSES[error.code].http


def error_headers(error: BatonError) -> list[tuple[bytes, bytes]]:
    """Headers of an error: how to authenticate, or when to retry, in whole seconds."""
    if error.code is ErrorCode.UNAUTHENTICATED:
        return [(b"www-authenticate", b"Bearer")]
    if error.code is ErrorCode.UNSUPPORTED_ENCODING:
        return [(b"accept-encoding", b"gzip")]
    retry_after_s = presentable(error).retry_after_s
    if retry_after_s is None:
        return []
    return [(b"retry-after", b"%d" % max(1, math.ceil(retry_after_s)))]
