"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

from protocol.errors import BatonError, ErrorCode
from router.errors import presentable
from router.offload import encode

_TYPES = {
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.PERMISSION_DENIED: "permission_error",
    ErrorCode.NOT_FOUND: "not_found_error",
    ErrorCode.PAYLOAD_TOO_LARGE: "request_too_large",
    ErrorCode.OVERLOADED: "rate_limit_error",
    ErrorCode.UNAVAILABLE: "overloaded_error",
    ErrorCode.HANDOFF_FAILED: "overloaded_error",
    ErrorCode.DEADLINE_EXCEEDED: "timeout_error",
    ErrorCode.STALE_MESSAGE: "api_error",
    ErrorCode.INTERNAL: "api_error",
}


def error_body(error: BatonError, request_id: str) -> bytes:
    """`param` and `code` are as OpenAI's clients get them, beside what Anthropic's expect."""
    info = presentable(error)
    fields = {
        "type": _TYPES.get(info.code, "invalid_request_error"),
        "message": info.message,
        "param": info.param,
        "code": info.code.value,
    }
    return encode({"type": "error", "error": fields, "request_id": request_id}).encode()
