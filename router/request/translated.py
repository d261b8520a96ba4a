"""Requests of other APIs, which become chat requests: the same fields, checks and tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import BatonError
from router.request.body import Body, check_depth
from router.request.endpoints import ChatRequest
from router.request.parse import parse_fields

#: Fields of chat, and what an API calls them.
Names = Sequence[tuple[re.Pattern[str], str]]


class TranslatedRequest(Body):
    """What all such requests may say, beside the fields of their API: their values are passed on
    as they are, and checked there (None: unset)."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    reasoning_effort: str | None = None
    stream: bool = False
    seed: int | None = None
    timeout: float | None = None
    timeline: bool = False
    cache_salt: str | None = None
    priority: int | None = None


class FittedChatRequest(ChatRequest):
    """A chat of an API that requires a limit of the output: clients send a large one."""

    fits_output = True


def chat_request(
    request: TranslatedRequest,
    fields: Mapping[str, Any],
    names: Names,
    kind: type[ChatRequest] = ChatRequest,
    ignored: list[str] | None = None,
) -> ChatRequest:
    """The chat request of `fields` and of the shared ones. Raises errors in the API's `names`."""
    shared = {name: getattr(request, name) for name in TranslatedRequest.__struct_fields__}
    try:
        return parse_fields(shared | dict(fields), kind, ignored)
    except BatonError as error:
        raise renamed(error, names) from None


def renamed(error: BatonError, names: Names) -> BatonError:
    """The error with the API's name of the field at fault."""
    param = error.param
    if param is None:
        return error
    for pattern, name in names:
        ours = pattern.sub(name, param)
        if ours != param:
            message = error.message.replace(param, ours)
            return type(error)(message, param=ours, retry_after_s=error.retry_after_s)
    return error


def json_text(value: object, param: str) -> str:
    """The text of a JSON value. Raises InvalidRequest naming the field when it is too deep."""
    check_depth(value, param)
    return json.dumps(value, ensure_ascii=False)
