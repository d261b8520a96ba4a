"""What HTTP clients ask besides outputs: token ids, counts, models, readiness."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from protocol.errors import BatonError, Unavailable
from router.anthropic.request import NAMES, CountTokensRequest, to_chat
from router.openai.exchange import BodyReader, HttpAnswer
from router.openai.paths import caller_of
from router.request.endpoints import DetokenizeRequest, TokenizeRequest
from router.request.translated import renamed
from router.served_model import ModelInfo
from router.service import InferenceService


class Lookups:
    """Tokenize, Detokenize, token counts, the models and readiness."""

    def __init__(self, service: InferenceService, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies

    async def tokenize(self, scope: Scope, receive: Receive, answer: HttpAnswer) -> None:
        request = await self._bodies.request(scope, receive, answer, TokenizeRequest)
        tokens = await self._service.tokenize(request, caller_of(scope))
        counts = {"count": len(tokens.ids), "max_model_len": tokens.max_model_len}
        await answer.object(counts | {"tokens": tokens.ids}, size=len(tokens.ids))

    async def detokenize(self, scope: Scope, receive: Receive, answer: HttpAnswer) -> None:
        request = await self._bodies.request(scope, receive, answer, DetokenizeRequest)
        text = await self._service.detokenize(request, caller_of(scope))
        await answer.object({"prompt": text}, size=len(text))

    async def count_tokens(self, scope: Scope, receive: Receive, answer: HttpAnswer) -> None:
        """Anthropic's question of how long a prompt is."""
        request = await self._bodies.request(
            scope, receive, answer, CountTokensRequest, lambda body, _: to_chat(body)
        )
        try:
            count = await self._service.count_prompt(request, caller_of(scope))
        except BatonError as error:
            raise renamed(error, NAMES) from error.__cause__
        await answer.object({"input_tokens": count}, size=1)

    async def models(self, request: Request) -> Response:
        """One list for OpenAI's clients and Anthropic's."""
        served = list(map(_model_json, self._service.models(caller_of(request.scope))))
        ids = [model["id"] for model in served] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return json_response({"object": "list", "data": served, **ends})

    async def model(self, request: Request) -> Response:
        name, caller = request.path_params["model"], caller_of(request.scope)
        return json_response(_model_json(self._service.find_model(name, caller)))

    async def ready(self, _: Request) -> Response:
        if self._service.ready:
            return json_response({"status": "ready"})
        state = "draining" if self._service.limits.draining else "no decode worker is ready"
        raise Unavailable(f"not ready: {state}", retry_after_s=1)


def json_response(value: object) -> Response:
    return Response(json.dumps(value).encode(), media_type="application/json")


def _model_json(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "max_model_len": model.max_model_len,
        "precision": model.precision,
        # as Anthropic's clients read it
        "type": "model",
        "display_name": model.id,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
    }
