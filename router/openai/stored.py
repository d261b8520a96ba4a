"""The stored responses of /v1/responses: read, continued, cancelled, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from protocol.errors import BatonError, InvalidRequest, Unsupported
from router.openai.exchange import BodyReader, HttpAnswer
from router.openai.lookups import json_response
from router.openai.paths import HttpApi, HttpCall, caller_of
from router.request.endpoints import ChatRequest
from router.request.translated import renamed
from router.responses.answers import ResponsesExchange
from router.responses.request import (
    NAMES,
    InputTokensRequest,
    ResponsesRequest,
    new_messages,
    to_chat,
)
from router.responses.store import ResponseStore, StoredResponse
from router.service import InferenceService

#: How long a cancelled response may take to end before it is shown as it is.
_CANCEL_S = 5.0


class StoredResponses:
    """The operations of /v1/responses, and of one response by its id."""

    def __init__(self, service: InferenceService, bodies: BodyReader, store: ResponseStore) -> None:
        self._service = service
        self._bodies = bodies
        self._store = store
        self.api = HttpApi("responses", ResponsesRequest, self._begin)

    def _begin(self, call: HttpCall, body: ResponsesRequest) -> ResponsesExchange:
        return ResponsesExchange(
            body,
            self._service.model_named,
            store=self._store,
            caller=call.caller,
            ignored=call.ignored,
            spawn=self._service.background.start,
        )

    async def input_tokens(self, scope: Scope, receive: Receive, answer: HttpAnswer) -> None:
        caller = caller_of(scope)

        def begin(body: InputTokensRequest, ignored: list[str] | None) -> ChatRequest:
            known = self._store.messages_up_to(body.previous_response_id, caller.name)
            return to_chat(body, [*known, *new_messages(body, ignored)], ignored)

        request = await self._bodies.request(scope, receive, answer, InputTokensRequest, begin)
        try:
            count = await self._service.count_prompt(request, caller)
        except BatonError as error:
            raise renamed(error, NAMES) from error.__cause__
        fields = {"object": "response.input_tokens", "input_tokens": count}
        await answer.object(fields, size=1)

    async def one(self, request: Request) -> Response:
        """Read or delete a response."""
        entry = self._entry(request)
        if request.method == "DELETE":
            response_id = entry.response["id"]
            self._store.delete(response_id, entry.owner)
            return json_response({"id": response_id, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") == "true":
            raise Unsupported("stream: a response is read whole", param="stream")
        return json_response(entry.response)

    async def cancel(self, request: Request) -> Response:
        entry = self._entry(request)
        if not entry.response["background"]:
            raise InvalidRequest(
                "only a response in the background can be cancelled", param="response_id"
            )
        if entry.task is not None:
            entry.task.cancel()
            await asyncio.wait({entry.task}, timeout=_CANCEL_S)
        return json_response(entry.response)

    async def items(self, request: Request) -> Response:
        """The input of a response, the newest item first unless `order` is asc."""
        entry = self._entry(request)
        items = [_shown(item, i, entry) for i, item in enumerate(entry.items)]
        if request.query_params.get("order", "desc") != "asc":
            items.reverse()
        ids = [item["id"] for item in items] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return json_response({"object": "list", "data": items, **ends})

    def _entry(self, request: Request) -> StoredResponse:
        return self._store.get(request.path_params["id"], caller_of(request.scope).name)


def _shown(item: Mapping[str, Any], index: int, entry: StoredResponse) -> dict[str, Any]:
    """An input item as the API lists it: with an id, its content as parts."""
    shown: dict[str, Any] = {"type": "message", "id": f"{entry.response['id']}_{index}", **item}
    content = shown.get("content")
    if isinstance(content, str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": content}]
    return shown
