"""The error tree. Every failure a caller can see is one of these, on every door.

BatonError
|-- InvalidRequest        a field of the request is wrong (names the field)
|   |-- ContextTooLong    the prompt, or prompt + output, cannot fit
|   `-- Unsupported       a known field that this build does not serve
|-- NotFound              no such model or object
|-- Unauthenticated       no key, or a wrong one
|-- PermissionDenied      a key without the right
|-- PayloadTooLarge       body or message over the limit
|-- UnsupportedEncoding   a body that is compressed in a way nobody here reads
|-- Overloaded            a bound is reached: try later
|-- Unavailable           no worker can serve this now: try later
|-- DeadlineExceeded      the request's deadline passed
|-- Cancelled             the caller went away
|-- StaleMessage          names an attempt, epoch, ticket or generation that is no longer current
|-- HandoffFailed         a KV transfer could not be completed
`-- Internal              a defect of ours
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    """The closed list of codes; also the label of the failure metrics."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_TOO_LONG = "context_length_exceeded"
    UNSUPPORTED = "unsupported"
    NOT_FOUND = "not_found"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    STALE_MESSAGE = "stale_message"
    HANDOFF_FAILED = "handoff_failed"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """An error as a value, for messages and events."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    def to_error(self) -> BatonError:
        """The exception of this code."""
        return _CLASSES[self.code](self.message, param=self.param, retry_after_s=self.retry_after_s)


class BatonError(Exception):
    """Base of the tree. `param` names the field at fault, `retry_after_s` when to come back."""

    code: ErrorCode = ErrorCode.INTERNAL

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        """This error as a value."""
        return ErrorInfo(
            code=self.code,
            message=self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class InvalidRequest(BatonError):
    """A field of the request is wrong; `param` names it."""

    code = ErrorCode.INVALID_REQUEST


class ContextTooLong(InvalidRequest):
    """The prompt, or prompt plus output, cannot fit the model or the KV pool."""

    code = ErrorCode.CONTEXT_TOO_LONG


class Unsupported(InvalidRequest):
    """A known field that this build does not serve; `param` names it."""

    code = ErrorCode.UNSUPPORTED


class NotFound(BatonError):
    """No such model or object."""

    code = ErrorCode.NOT_FOUND


class Unauthenticated(BatonError):
    """No key, or a wrong one."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(BatonError):
    """The caller is known and may not do this."""

    code = ErrorCode.PERMISSION_DENIED


class PayloadTooLarge(BatonError):
    """A body or message is over its limit."""

    code = ErrorCode.PAYLOAD_TOO_LARGE


class UnsupportedEncoding(BatonError):
    """A body is compressed in a way that is not read here."""

    code = ErrorCode.UNSUPPORTED_ENCODING


class Overloaded(BatonError):
    """A bound of queued work is reached; come back after `retry_after_s`."""

    code = ErrorCode.OVERLOADED


class Unavailable(BatonError):
    """No worker can serve this now; come back after `retry_after_s`."""

    code = ErrorCode.UNAVAILABLE


class DeadlineExceeded(BatonError):
    """The request's deadline passed."""

    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(BatonError):
    """The caller went away."""

    code = ErrorCode.CANCELLED


class StaleMessage(BatonError):
    """Names an attempt, epoch, ticket or block generation that is no longer current."""

    code = ErrorCode.STALE_MESSAGE


class HandoffFailed(BatonError):
    """A KV transfer could not be completed."""

    code = ErrorCode.HANDOFF_FAILED


class Internal(BatonError):
    """A defect of ours."""

    code = ErrorCode.INTERNAL


_CLASSES: dict[ErrorCode, type[BatonError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextTooLong,
        Unsupported,
        NotFound,
        Unauthenticated,
        PermissionDenied,
        PayloadTooLarge,
        UnsupportedEncoding,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        StaleMessage,
        HandoffFailed,
        Internal,
    )
}

#: HTTP status of each code (499 is the customary "client closed request").
HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.CONTEXT_TOO_LONG: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.PAYLOAD_TOO_LARGE: 413,
    ErrorCode.UNSUPPORTED_ENCODING: 415,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.CANCELLED: 499,
    ErrorCode.STALE_MESSAGE: 409,
    ErrorCode.HANDOFF_FAILED: 503,
    ErrorCode.INTERNAL: 500,
}

#: gRPC status name of each code (`grpc.StatusCode[...]`).
GRPC_STATUS: dict[ErrorCode, str] = {
    ErrorCode.INVALID_REQUEST: "INVALID_ARGUMENT",
    ErrorCode.CONTEXT_TOO_LONG: "INVALID_ARGUMENT",
    ErrorCode.UNSUPPORTED: "INVALID_ARGUMENT",
    ErrorCode.NOT_FOUND: "NOT_FOUND",
    ErrorCode.UNAUTHENTICATED: "UNAUTHENTICATED",
    ErrorCode.PERMISSION_DENIED: "PERMISSION_DENIED",
    ErrorCode.PAYLOAD_TOO_LARGE: "RESOURCE_EXHAUSTED",
    ErrorCode.UNSUPPORTED_ENCODING: "UNIMPLEMENTED",
    ErrorCode.OVERLOADED: "RESOURCE_EXHAUSTED",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    ErrorCode.CANCELLED: "CANCELLED",
    ErrorCode.STALE_MESSAGE: "FAILED_PRECONDITION",
    ErrorCode.HANDOFF_FAILED: "UNAVAILABLE",
    ErrorCode.INTERNAL: "INTERNAL",
}
