"""Errors as clients see them. Of what a client sent, only a part is echoed."""

from __future__ import annotations

from protocol.errors import BatonError, ErrorCode, ErrorInfo

#: Trailers of a gRPC call hold 8 KiB, and a character can take 12 bytes there.
MAX_MESSAGE = 300
MAX_PARAM = 100
#: When to retry after a temporary failure that says no time.
DEFAULT_RETRY_S = 1.0
_TEMPORARY = (ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE, ErrorCode.HANDOFF_FAILED)


def presentable(error: BatonError) -> ErrorInfo:
    """The error as a value, its texts cut to a length that HTTP and gRPC carry."""
    return ErrorInfo(
        code=error.code,
        message=_cut(error.message, MAX_MESSAGE),
        param=None if error.param is None else _cut(error.param, MAX_PARAM),
        retry_after_s=_retry_after_s(error),
    )


def _retry_after_s(error: BatonError) -> float | None:
    if error.retry_after_s is None and error.code in _TEMPORARY:
        return DEFAULT_RETRY_S
    return error.retry_after_s


def _cut(text: str, length: int) -> str:
    text = text.encode("utf-8", "replace").decode()  # lone surrogates have no form in UTF-8
    return text if len(text) <= length else text[: length - 3] + "..."
