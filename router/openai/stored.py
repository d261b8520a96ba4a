"""The stored responses of /v1/responses: read, continued, cancelled, deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from protocol.errors import BatonError, Unsupported
from protocol.stored_responses import ResponseAction
from router.openai.exchange import BodyReader, HttpAnswer
from router.openai.lookups import json_response
from router.openai.paths import HttpApi, HttpCall, caller_of
from router.request.translated import renamed
from router.responses.answers import ResponsesExchange
from router.responses.request import NAMES, InputTokensRequest, ResponsesRequest
from router.responses.shared import ContinuedChat, SharedResponses
from router.responses.store import StoredResponse
from router.service import InferenceService


class StoredResponses:
    """The operations of /v1/responses, and of one response by its id."""

    def __init__(
        self, service: InferenceService, bodies: BodyReader, responses: SharedResponses
    ) -> None:
        self._service = service
        self._bodies = bodies
        self._responses = responses
        complete = ResponsesExchange.complete
        self.api = HttpApi("responses", ResponsesRequest, self._begin, complete)

    def _begin(self, call: HttpCall, body: ResponsesRequest) -> ResponsesExchange:
        return ResponsesExchange(
            body,
            self._service.model_named,
            responses=self._responses,
            caller=call.caller,
            ignored=call.ignored,
            spawn=self._service.background.start,
        )

    async def input_tokens(self, scope: Scope, receive: Receive, answer: HttpAnswer) -> None:
        caller = caller_of(scope)

        def begin(body: InputTokensRequest, ignored: list[str] | None) -> ContinuedChat:
            return ContinuedChat(body, self._responses, caller.name, ignored)

        chat = await self._bodies.request(scope, receive, answer, InputTokensRequest, begin)
        try:
            await chat.complete()
            count = await self._service.count_prompt(chat.request, caller)
        except BatonError as error:
            raise renamed(error, NAMES) from error.__cause__
        fields = {"object": "response.input_tokens", "input_tokens": count}
        await answer.object(fields, size=1)

    async def one(self, request: Request) -> Response:
        """Read or delete a response."""
        if request.method == "DELETE":
            entry = await self._found(request, ResponseAction.DELETE)
            deleted = {"id": entry.response["id"], "object": "response", "deleted": True}
            return json_response(deleted)
        entry = await self._found(request)
        if request.query_params.get("stream", "false") == "true":
            raise Unsupported("stream: a response is read whole", param="stream")
        return json_response(entry.response)

    async def cancel(self, request: Request) -> Response:
        entry = await self._found(request, ResponseAction.CANCEL)
        return json_response(entry.response)

    async def items(self, request: Request) -> Response:
        """The input of a response, the newest item first unless `order` is asc."""
        entry = await self._found(request)
        items = [_shown(item, i, entry) for i, item in enumerate(entry.items)]
        if request.query_params.get("order", "desc") != "asc":
            items.reverse()
        ids = [item["id"] for item in items] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return json_response({"object": "list", "data": items, **ends})

    async def _found(
        self, request: Request, action: ResponseAction = ResponseAction.READ
    ) -> StoredResponse:
        owner = caller_of(request.scope).name
        return await self._responses.find(request.path_params["id"], owner, action)


def _shown(item: Mapping[str, Any], index: int, entry: StoredResponse) -> dict[str, Any]:
    """An input item as the API lists it: with an id, its content as parts."""
    shown: dict[str, Any] = {"type": "message", "id": f"{entry.response['id']}_{index}", **item}
    content = shown.get("content")
    if isinstance(content, str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": content}]
    return shown
