"""OpenAI's response objects. What is the same in every chunk of a stream is serialised once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from protocol.states import FinishReason
from router.choice import Delta
from router.generation import Generation, Usage
from router.large import encode as _encode
from router.large import encode_in_pieces
from router.openai.calls import calls_json, delta_json
from router.openai.logprobs import logprobs_json, prompt_logprobs_json
from router.request import GenerateRequest, RequestKind

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Writes the server-sent events of one stream."""

    def __init__(self, request: GenerateRequest, generation: Generation, *, model: str) -> None:
        chat = request.kind is RequestKind.CHAT
        self._request = request
        self._generation = generation
        self._pieces = generation.pieces
        self._head = _head(request, generation, model=model, stream=True)
        self._token_ids = request.return_token_ids
        self._usage_null = ',"usage":null' if request.include_usage else ""
        self._started: set[int] = set()
        self._before_text = ',"delta":{"content":' if chat else ',"text":'
        self._after_text = "}" if chat else ""
        self._tools = request.tools is not None
        content = "null" if self._tools else '""'  # a text may never come
        self._first = f',"delta":{{"role":"assistant","content":{content}}}' if chat else None
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        self._num_tokens = 0
        self._timeline = request.timeline

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """One event for each delta; a chat choice opens with its role."""
        out: list[str] = []
        for delta in deltas:
            self._num_tokens += len(delta.token_ids)
            extra = self._extra(delta) if self._token_ids else ""
            if self._first is not None and delta.index not in self._started:
                out.append(self._event(delta.index, self._first, "null", ""))
            self._started.add(delta.index)
            if self._tools:
                text = f',"delta":{_encode(delta_json(delta))}'
            else:
                text = f"{self._before_text}{_encode(delta.text)}{self._after_text}"
            if delta.scores is None and delta.prompt_scores is None:
                out.append(self._event(delta.index, text, _finish(delta.finish), extra))
            else:
                out.append(self._scored_event(delta, text, extra))
        return "".join(out).encode()

    def last(self) -> bytes:
        """What comes after the last token: usage and timeline, if asked for, and the end mark."""
        fields: list[str] = []
        if self._include_usage:
            fields.append(f'"usage":{_encode(usage_json(self._generation.usage))}')
        if self._timeline:
            fields.append(f'"timeline":{_encode(self._generation.timeline().to_json())}')
        if not fields:
            return DONE
        return f'data: {self._head}"choices":[],{",".join(fields)}}}\n\n'.encode() + DONE

    def _event(
        self,
        index: int,
        content: str,
        finish: str,
        extra: str,
        logprobs: str = "null",
        end: str = "",
    ) -> str:
        usage = self._usage_null
        if self._continuous_usage:
            so_far = replace(self._generation.usage, completion_tokens=self._num_tokens)
            usage = f',"usage":{_encode(usage_json(so_far))}'
        return (
            f'data: {self._head}"choices":[{{"index":{index}{content},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{extra}}}]{usage}{end}}}\n\n'
        )

    def _scored_event(self, delta: Delta, text: str, extra: str) -> str:
        logprobs = encode_in_pieces(logprobs_json(self._request, self._pieces, [delta]))
        prompt, end = prompt_logprobs_json(self._request, self._pieces, delta), ""
        if prompt is not None:
            field = f',"prompt_logprobs":{encode_in_pieces(prompt)}'
            extra, end = (extra, field) if self._first is not None else (extra + field, "")
        return self._event(delta.index, text, _finish(delta.finish), extra, logprobs, end)

    def _extra(self, delta: Delta) -> str:
        extra = f',"token_ids":{_encode(delta.token_ids)}'
        if delta.index not in self._started:
            prompt = _encode(self._generation.prompts[delta.index])
            extra += f',"prompt_token_ids":{prompt}'
        return extra


class Collector:
    """Gathers the deltas of a request that is not streamed."""

    def __init__(self, request: GenerateRequest, generation: Generation, *, model: str) -> None:
        self._request = request
        self._generation = generation
        self._model = model
        count = len(generation.prompts)
        self._deltas: list[list[Delta]] = [[] for _ in range(count)]
        self.num_scores = 0

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take deltas in order."""
        for delta in deltas:
            self._deltas[delta.index].append(delta)
            self.num_scores += delta.num_scores

    def body(self) -> bytes:
        """The response, once every choice has finished."""
        head = _head(self._request, self._generation, model=self._model, stream=False)
        choices = [self._choice(*item) for item in enumerate(self._deltas)]
        rest: dict[str, Any] = {"choices": choices, "usage": usage_json(self._generation.usage)}
        if self._request.kind is RequestKind.CHAT and self._request.prompt_logprobs is not None:
            rest["prompt_logprobs"] = self._prompt_logprobs(self._deltas[0])
        if self._request.timeline:
            rest["timeline"] = self._generation.timeline().to_json()
        return (head + encode_in_pieces(rest)[1:]).encode()

    def _choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        finish = self._generation.finishes[index]
        choice: dict[str, Any] = {"index": index}
        if self._request.kind is RequestKind.CHAT:
            choice["message"] = _message(text, calls_json(deltas))
        else:
            choice["text"] = text
        logprobs = logprobs_json(self._request, self._generation.pieces, deltas)
        choice |= {"logprobs": logprobs, "finish_reason": None if finish is None else finish.value}
        if self._request.return_token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.token_ids]
            choice["prompt_token_ids"] = self._generation.prompts[index]
        if (
            self._request.kind is RequestKind.COMPLETION
            and self._request.prompt_logprobs is not None
        ):
            choice["prompt_logprobs"] = self._prompt_logprobs(deltas)
        return choice

    def _prompt_logprobs(self, deltas: Sequence[Delta]) -> list[dict[str, Any] | None] | None:
        return prompt_logprobs_json(self._request, self._generation.pieces, deltas[0])


def _message(text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return message


def usage_json(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI writes it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _head(request: GenerateRequest, generation: Generation, *, model: str, stream: bool) -> str:
    if request.kind is RequestKind.CHAT:
        prefix, kind = "chatcmpl", "chat.completion.chunk" if stream else "chat.completion"
    else:
        prefix, kind = "cmpl", "text_completion"
    head = {
        "id": f"{prefix}-{generation.request_id}",
        "object": kind,
        "created": int(generation.arrival),
        "model": model,
    }
    if request.service_tier is not None:
        head["service_tier"] = generation.tier_name
    return _encode(head)[:-1] + ","


def _finish(reason: FinishReason | None) -> str:
    return "null" if reason is None else f'"{reason.value}"'
