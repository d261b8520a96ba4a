"""A gRPC call beside its messages: metadata, and typed errors as its status.

Details of a status follow google.rpc (https://cloud.google.com/apis/design/errors): BadRequest
names the field, RetryInfo says when to retry. Plain trailers say the same to clients without those
types.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from protocol.errors import STATUSES, BatonError, ErrorInfo
from protocol.timeline import TraceContext, parse_trace
from router.errors import presentable

_DETAILS_KEY = "grpc-status-details-bin"


def metadata_value(context: aio.ServicerContext[Any, Any], name: str) -> str | None:
    """The first value of this (lower-case) key."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return None


def trace_of(context: aio.ServicerContext[Any, Any]) -> TraceContext | None:
    return parse_trace(
        metadata_value(context, "traceparent"), metadata_value(context, "tracestate")
    )


async def abort(context: aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    info = presentable(error)
    code = grpc.StatusCode[STATUSES[info.code].grpc]
    await context.abort(code, info.message, (*trailers(info), *context.trailing_metadata()))
    raise AssertionError("abort returned")


def trailers(info: ErrorInfo) -> tuple[tuple[str, str | bytes], ...]:
    pairs: list[tuple[str, str | bytes]] = [("baton-error-code", info.code.value)]
    status = status_pb2.Status(
        code=grpc.StatusCode[STATUSES[info.code].grpc].value[0], message=info.message
    )
    if info.param is not None:
        pairs.append(("baton-error-param", info.param.encode("ascii", "replace").decode()))
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=info.param, description=info.message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if info.retry_after_s is not None:
        pairs.append(("retry-after", f"{info.retry_after_s:g}"))
        delay = Duration()
        delay.FromNanoseconds(int(info.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    pairs.append((_DETAILS_KEY, status.SerializeToString()))
    return tuple(pairs)
