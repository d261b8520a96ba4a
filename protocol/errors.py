"""Every failure that a caller can see, with its HTTP and gRPC status."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from protocol.message import Message


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


class Status(NamedTuple):
    """HTTP status, and the name of a grpc.StatusCode."""

    http: int
    grpc: str


class ErrorInfo(Message):
    """An error as a value, for messages and events."""

    code: ErrorCode
    param: str | None = None
    retry_after_s: float | None = None
    message: str

    def to_error(self) -> BatonError:
        return _CLASSES[self.code](self.message, param=self.param, retry_after_s=self.retry_after_s)


class BatonError(Exception):
    """Base class. `param` names the field at fault; retry after `retry_after_s` seconds."""

    code = ErrorCode.INTERNAL
    status = Status(500, "INTERNAL")

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code,
            message=self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class InvalidRequest(BatonError):
    """A field of the request is wrong; `param` names it."""

    code = ErrorCode.INVALID_REQUEST
    status = Status(400, "INVALID_ARGUMENT")


class ContextTooLong(InvalidRequest):
    """The prompt, or prompt plus output, cannot fit the model or the KV pool."""

    code = ErrorCode.CONTEXT_TOO_LONG
    status = Status(400, "INVALID_ARGUMENT")


class Unsupported(InvalidRequest):
    """A known field that this build does not serve; `param` names it."""

    code = ErrorCode.UNSUPPORTED
    status = Status(400, "INVALID_ARGUMENT")


class NotFound(BatonError):
    """No such model or object."""

    code = ErrorCode.NOT_FOUND
    status = Status(404, "NOT_FOUND")


class Unauthenticated(BatonError):
    """No key, or a wrong one."""

    code = ErrorCode.UNAUTHENTICATED
    status = Status(401, "UNAUTHENTICATED")


class PermissionDenied(BatonError):
    """The caller's key does not allow this."""

    code = ErrorCode.PERMISSION_DENIED
    status = Status(403, "PERMISSION_DENIED")


class PayloadTooLarge(BatonError):
    """A body or message is over its limit."""

    code = ErrorCode.PAYLOAD_TOO_LARGE
    status = Status(413, "RESOURCE_EXHAUSTED")


class UnsupportedEncoding(BatonError):
    """A body has a compression that is not supported."""

    code = ErrorCode.UNSUPPORTED_ENCODING
    status = Status(415, "UNIMPLEMENTED")


class Overloaded(BatonError):
    """A queue is full; retry after `retry_after_s`."""

    code = ErrorCode.OVERLOADED
    status = Status(429, "RESOURCE_EXHAUSTED")


class Unavailable(BatonError):
    """No worker can serve this now; retry after `retry_after_s`."""

    code = ErrorCode.UNAVAILABLE
    status = Status(503, "UNAVAILABLE")


class DeadlineExceeded(BatonError):
    """The request's deadline passed."""

    code = ErrorCode.DEADLINE_EXCEEDED
    status = Status(504, "DEADLINE_EXCEEDED")


class Cancelled(BatonError):
    """The caller disconnected or cancelled."""

    code = ErrorCode.CANCELLED
    status = Status(499, "CANCELLED")  # the customary "client closed request"


class StaleMessage(BatonError):
    """Names an attempt, epoch, ticket or block generation that is no longer current."""

    code = ErrorCode.STALE_MESSAGE
    status = Status(409, "FAILED_PRECONDITION")


class HandoffFailed(BatonError):
    """A KV transfer could not be completed."""

    code = ErrorCode.HANDOFF_FAILED
    status = Status(503, "UNAVAILABLE")


class Internal(BatonError):
    """A defect of Baton."""

    code = ErrorCode.INTERNAL
    status = Status(500, "INTERNAL")


def invalid_field(error: Exception) -> InvalidRequest:
    """A msgspec.ValidationError as the error of the field it names.

    `$.messages[0].name` becomes `messages[0].name`. Places in arrays of plain values and keys of
    maps are left out: `stop`, not `stop[0]`.
    """
    fault, path = str(error), ""
    if place := _PLACE.search(fault):
        fault, path = fault[: place.start()], place[1]
    if field := _FIELD.fullmatch(fault):
        param = f"{path}.{field[2]}".removeprefix(".")
        what = "is required" if field[1] == "missing required" else "is not a known field"
        return InvalidRequest(f"{param} {what}", param=param)
    if not fault.startswith("Expected `object`"):
        path = _INDEX.sub("", path)
    fault = _TYPES.sub(_type_names, fault)
    if fault.startswith("Expected "):
        fault = f"{path or 'body'} must be {fault.removeprefix('Expected ')}"
    else:
        fault = f"{path}: {fault[0].lower()}{fault[1:]}"
    return InvalidRequest(fault, param=path or "body")


_PLACE = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$", re.DOTALL)
_FIELD = re.compile("Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_INDEX = re.compile(r"(\[[^\]]*\])+$")
_TYPES = re.compile("`([a-z| ]+)`")
_TYPE_NAMES = {
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "array": "an array",
    "object": "an object",
}


def _type_names(types: re.Match[str]) -> str:
    return " or ".join(_TYPE_NAMES.get(name, name) for name in types[1].split(" | "))


def typed(error: BaseException) -> BatonError:
    """The error itself if it is a BatonError, else an Internal that names it."""
    if isinstance(error, BatonError):
        return error
    internal = Internal(f"{type(error).__name__}: {error}")
    internal.__cause__ = error
    return internal


_CLASSES = {
    cls.code: cls
    for cls in (
        *(InvalidRequest, ContextTooLong, Unsupported, NotFound, Unauthenticated),
        *(PermissionDenied, PayloadTooLarge, UnsupportedEncoding, Overloaded, Unavailable),
        *(DeadlineExceeded, Cancelled, StaleMessage, HandoffFailed, Internal),
    )
}

STATUSES = {code: cls.status for code, cls in _CLASSES.items()}
