"""Answers of the Messages API: whole, or as its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from protocol.errors import BatonError, InvalidRequest
from protocol.states import FinishReason
from router.anthropic.errors import error_body
from router.anthropic.request import NAMES, MessagesRequest, to_chat
from router.dispatch.request_run import Delta, RequestRun
from router.offload import encode, server_event
from router.request.body import check_depth
from router.request.translated import renamed
from router.served_model import ModelInfo
from router.text.tool_parser import CallDelta

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class MessagesExchange:
    """A message and the answers to it (router.openai.paths.ApiExchange)."""

    def __init__(self, body: MessagesRequest, model: ModelInfo, request_id: str) -> None:
        self.request = to_chat(body)
        self.shows_thoughts = body.thinking is None or body.thinking.display != "omitted"
        self._model = model
        self.request_id = request_id

    def stream(self, run: RequestRun) -> MessageWriter:
        return MessageWriter(self, run)

    def whole(self, run: RequestRun, deltas: Sequence[Delta]) -> bytes:
        (delta,) = deltas
        content: list[dict[str, Any]] = []
        if delta.reasoning and self.shows_thoughts:
            content.append({"type": "thinking", "thinking": delta.reasoning, "signature": ""})
        if delta.text:
            content.append({"type": "text", "text": delta.text})
        content += map(_tool_use, delta.calls)
        message = self.message(run, content) | self.stop(run, delta)
        return encode(message | self.timeline(run)).encode()

    def detached(self, *_: object) -> None:
        """The connection is needed."""

    def named(self, error: BatonError) -> BatonError:
        return renamed(error, NAMES)

    def message(self, run: RequestRun, content: list[dict[str, Any]]) -> dict[str, Any]:
        """A message that has not ended."""
        head = {"id": f"msg_{run.request_id}", "type": "message", "role": "assistant"}
        rest = {"stop_reason": None, "stop_sequence": None, "usage": _usage(run)}
        return {**head, "model": self._model.id, "content": content, **rest}

    def stop(self, run: RequestRun, last: Delta) -> dict[str, Any]:
        """Why the output ended."""
        if isinstance(last.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
        reason = _REASONS[last.finish or FinishReason.STOP]
        limit = self.request.output_limit or 0
        if reason == "max_tokens" and run.usage.completion_tokens < limit:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def timeline(self, run: RequestRun) -> dict[str, Any]:
        return {"timeline": run.timeline()} if self.request.timeline else {}


class MessageWriter:
    """Writes the events of one answer: blocks of thoughts, text and calls, one after the other."""

    def __init__(self, exchange: MessagesExchange, run: RequestRun) -> None:
        self._exchange = exchange
        self._run = run
        self._last: Delta | None = None
        self._index = -1  # of the present block
        self._open = ""  # its type
        self._out: list[str] = []

    def events(self, deltas: Sequence[Delta]) -> bytes:
        if self._last is None:
            self._add("message_start", {"message": self._exchange.message(self._run, [])})
        for delta in deltas:
            if delta.reasoning and self._exchange.shows_thoughts:
                self._continue("thinking", {"thinking": "", "signature": ""})
                self._add_delta({"type": "thinking_delta", "thinking": delta.reasoning})
            if delta.text:
                self._continue("text", {"text": ""})
                self._add_delta({"type": "text_delta", "text": delta.text})
            for call in delta.calls:
                self._add_call(call)
            self._last = delta
        return self._taken()

    def last(self) -> bytes:
        self._close()
        assert self._last is not None
        ended = {"delta": self._exchange.stop(self._run, self._last), "usage": _usage(self._run)}
        self._add("message_delta", ended | self._exchange.timeline(self._run))
        self._add("message_stop", {})
        return self._taken()

    def failed(self, error: BatonError) -> bytes:
        named = self._exchange.named(error)
        return b"event: error\ndata: " + error_body(named, self._exchange.request_id) + b"\n\n"

    def _add_call(self, call: CallDelta) -> None:
        if call.id is not None:
            self._close()
            self._continue("tool_use", {"id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            self._add_delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _continue(self, kind: str, fields: dict[str, Any]) -> None:
        """Go on with a block of this kind: the present one, or a new one that begins so."""
        if self._open == kind:
            return
        self._close()
        self._index, self._open = self._index + 1, kind
        block = {"type": kind, **fields}
        self._add("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> None:
        if self._open:
            self._add("content_block_stop", {"index": self._index})
            self._open = ""

    def _add_delta(self, delta: dict[str, Any]) -> None:
        self._add("content_block_delta", {"index": self._index, "delta": delta})

    def _add(self, kind: str, fields: dict[str, Any]) -> None:
        self._out.append(server_event({"type": kind, **fields}, name=kind))

    def _taken(self) -> bytes:
        out, self._out = "".join(self._out), []
        return out.encode()


def _usage(run: RequestRun) -> dict[str, Any]:
    """Anthropic counts what was read from a cache beside the other tokens of the prompt."""
    usage = run.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _tool_use(call: CallDelta) -> dict[str, Any]:
    try:
        arguments = _OBJECT.decode(call.arguments)
        check_depth(arguments, "input")
    except (msgspec.DecodeError, RecursionError, InvalidRequest):
        # Cut short by max_tokens, or nothing that an answer can hold: NaN, 1e999, half a pair.
        arguments = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
