"""Response objects: whole, or as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from observability.logging import get_logger
from protocol.errors import BatonError, Cancelled, ErrorCode, Internal, InvalidRequest, typed
from protocol.states import FinishReason
from router.auth.keys import Caller
from router.dispatch.request_run import Delta, RequestRun
from router.errors import presentable
from router.offload import encode, server_event
from router.request.endpoints import ChatRequest
from router.request.generate_request import RequestId
from router.request.translated import renamed
from router.responses.request import NAMES, ResponsesRequest, input_items
from router.responses.shared import ContinuedChat, SharedResponses
from router.responses.store import StoredResponse
from router.served_model import ModelInfo
from router.text.tool_parser import CallDelta

log = get_logger(__name__)

Event = tuple[str, dict[str, Any]]
#: Begins to generate: a context as InferenceService.generate gives it.
Start = Callable[[], AbstractAsyncContextManager[RequestRun]]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class ResponsesExchange:
    """A request for a response and the answers to it (router.openai.paths.ApiExchange)."""

    def __init__(
        self,
        body: ResponsesRequest,
        model: ModelInfo,
        *,
        responses: SharedResponses,
        caller: Caller,
        ignored: list[str] | None,
        spawn: Spawn,
    ) -> None:
        """`spawn` runs a response in the background. Raises InvalidRequest, also when the response
        before is not stored."""
        self.body = body
        self._spawn = spawn
        self._model = model
        self._responses = responses
        self._owner = caller.name
        self._chat = ContinuedChat(body, responses, self._owner, ignored)

    @property
    def request(self) -> ChatRequest:
        return self._chat.request

    async def complete(self) -> None:
        """Fetch what another router has stored."""
        await self._chat.complete()

    def detached(self, start: Start, request_id: RequestId, arrival: float) -> bytes | None:
        """A response that goes on in the background, as it begins; None if it is not to."""
        if not self.body.background:
            return None
        response = self.response(request_id.key, int(arrival)) | {"status": "queued"}
        entry = self._entry(response, None)
        entry.task = self._spawn(self._run(start, entry))
        self._responses.local.put(entry)
        return encode(response).encode()

    async def _run(self, start: Start, entry: StoredResponse) -> None:
        try:
            async with start() as run:
                entry.response["status"] = "in_progress"
                deltas = [delta async for part in run for delta in part]
                self.finished(run, deltas)
        except asyncio.CancelledError:
            entry.response["status"] = "cancelled"
            raise Cancelled("the response was cancelled") from None  # a failure, for the counters
        except Exception as error:
            entry.response |= failure(self.named(fault := typed(error)))
            if isinstance(fault, Internal):
                log.error("request failed", exc_info=error, extra={"request": entry.response["id"]})
            raise
        finally:
            entry.task = None

    def stream(self, run: RequestRun) -> ResponseWriter:
        return ResponseWriter(self, run)

    def whole(self, run: RequestRun, deltas: Sequence[Delta]) -> bytes:
        return encode(self.finished(run, deltas)).encode()

    def finished(self, run: RequestRun, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The response of all deltas, stored if the request allows it."""
        items = OutputItems(run.request_id)
        for delta in deltas:
            items.add(delta)
        finish = deltas[-1].finish
        items.close(finish)
        return self.ended(run, items, finish)

    def named(self, error: BatonError) -> BatonError:
        return renamed(error, NAMES)

    def response(self, request_id: str, created: int) -> dict[str, Any]:
        """The response of a request without output, in progress."""
        body = self.body
        form = body.text.format if body.text else None
        return {
            "id": self._responses.response_id(request_id),
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": body.background,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model.id,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "service_tier": body.service_tier or "auto",
            "store": body.store,
            "temperature": self.request.temperature,
            "text": {"format": {"type": "text"} if form is None else _shown(form)},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_p": self.request.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
        }

    def ended(
        self, run: RequestRun, items: OutputItems, finish: FinishReason | None
    ) -> dict[str, Any]:
        """The response at its end, stored if the request allows it."""
        usage = run.usage
        response = self.response(run.request_id, int(run.arrival))
        response |= {"status": "completed", "output": items.items, "usage": _usage(usage.to_json())}
        if finish is FinishReason.LENGTH:
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.request.timeline:
            response["timeline"] = run.timeline()
        if self.body.store:
            self._responses.local.put(self._entry(response, items.message))
        return response

    def _entry(self, response: dict[str, Any], output: Mapping[str, Any] | None) -> StoredResponse:
        return StoredResponse(
            owner=self._owner,
            response=response,
            items=input_items(self.body),
            messages=[*self._chat.messages, *([output] if output else ())],
        )


class OutputItems:
    """Collects an output as items: thoughts, a message, calls. `message` is the same as chat has
    it."""

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self.message: dict[str, Any] = {"role": "assistant"}
        self._request_id = request_id
        self._open = False

    def add(self, delta: Delta) -> Sequence[Event]:
        """The events of what a delta adds."""
        out: list[Event] = []
        if delta.reasoning:
            self._text(out, "reasoning", "reasoning_text", delta.reasoning)
        if delta.text:
            self._text(out, "message", "output_text", delta.text)
        for call in delta.calls:
            self._call(out, call)
        return out

    def close(self, finish: FinishReason | None) -> Sequence[Event]:
        """The events that end the last item."""
        out: list[Event] = []
        self._close(out, cut=finish is FinishReason.LENGTH)
        return out

    def _text(self, out: list[Event], kind: str, part_kind: str, text: str) -> None:
        if not self._open or self.items[-1]["type"] != kind:
            self._close(out)
            item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
            item |= {"role": "assistant", "summary": []}
            del item["summary" if kind == "message" else "role"]
            self._add(out, item, "msg" if kind == "message" else "rs")
            item["content"] = [_part(part_kind, "")]
            added = {"part": _part(part_kind, "")}
            self._event(out, "response.content_part.added", added, at=0)
        self.items[-1]["content"][0]["text"] += text
        name = "reasoning_content" if kind == "reasoning" else "content"
        self.message[name] = self.message.get(name, "") + text
        self._event(out, f"response.{part_kind}.delta", {"delta": text, **_scores(part_kind)}, at=0)

    def _call(self, out: list[Event], call: CallDelta) -> None:
        if call.id is not None:
            self._close(out)
            item = {"type": "function_call", "status": "in_progress", "arguments": ""}
            self._add(out, item | {"call_id": call.id, "name": call.name}, "fc")
            function = {"name": call.name, "arguments": ""}
            made = {"id": call.id, "type": "function", "function": function}
            self.message.setdefault("tool_calls", []).append(made)
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            self.message["tool_calls"][-1]["function"]["arguments"] += call.arguments
            arguments = {"delta": call.arguments}
            self._event(out, "response.function_call_arguments.delta", arguments)

    def _add(self, out: list[Event], item: dict[str, Any], prefix: str) -> None:
        item["id"] = f"{prefix}_{self._request_id}_{len(self.items)}"
        self.items.append(item)
        self._open = True
        index = len(self.items) - 1
        out.append(("response.output_item.added", {"output_index": index, "item": dict(item)}))

    def _close(self, out: list[Event], *, cut: bool = False) -> None:
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "function_call":
            called = {"name": item["name"], "arguments": item["arguments"]}
            self._event(out, "response.function_call_arguments.done", called)
        else:
            part = item["content"][0]
            text = {"text": part["text"], **_scores(part["type"])}
            self._event(out, f"response.{part['type']}.done", text, at=0)
            self._event(out, "response.content_part.done", {"part": part}, at=0)
        index = len(self.items) - 1
        out.append(("response.output_item.done", {"output_index": index, "item": dict(item)}))

    def _event(
        self, out: list[Event], name: str, fields: Mapping[str, Any], *, at: int | None = None
    ) -> None:
        place = {} if at is None else {"content_index": at}
        index = len(self.items) - 1
        head = {"item_id": self.items[-1]["id"], "output_index": index}
        out.append((name, {**head, **place, **fields}))


class ResponseWriter:
    """Writes the events of one response."""

    def __init__(self, exchange: ResponsesExchange, run: RequestRun) -> None:
        self._exchange = exchange
        self._run = run
        self._items = OutputItems(run.request_id)
        self._number = 0
        self._finish: FinishReason | None = None

    def events(self, deltas: Sequence[Delta]) -> bytes:
        out: list[Event] = []
        if not self._number:
            run = self._run
            response = self._exchange.response(run.request_id, int(run.arrival))
            out += [(f"response.{n}", {"response": response}) for n in ("created", "in_progress")]
        for delta in deltas:
            out += self._items.add(delta)
            self._finish = delta.finish
        return self._written(out)

    def last(self) -> bytes:
        closing = self._items.close(self._finish)
        response = self._exchange.ended(self._run, self._items, self._finish)
        return self._written([*closing, (f"response.{response['status']}", {"response": response})])

    def failed(self, error: BatonError) -> bytes:
        run, error = self._run, self._exchange.named(error)
        response = self._exchange.response(run.request_id, int(run.arrival))
        response |= {"output": self._items.items, **failure(error)}
        return self._written([("response.failed", {"response": response})])

    def _written(self, events: Sequence[Event]) -> bytes:
        out = []
        for name, fields in events:
            numbered = {"type": name, "sequence_number": self._number, **fields}
            out.append(server_event(numbered, name=name))
            self._number += 1
        return "".join(out).encode()


def failure(error: BatonError) -> dict[str, Any]:
    """The fields of a response that failed."""
    info = presentable(error)
    code = "rate_limit_exceeded" if info.code is ErrorCode.OVERLOADED else "server_error"
    if isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    return {"status": "failed", "error": {"code": code, "message": info.message}}


def _scores(part_kind: str) -> dict[str, Any]:
    """Texts come with a list of log-probabilities, which is empty."""
    return {"logprobs": []} if part_kind == "output_text" else {}


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part


def _shown(form: Any) -> dict[str, Any]:
    shown = {name: getattr(form, name) for name in form.__struct_fields__}
    return {name: value for name, value in shown.items() if value is not None}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }
