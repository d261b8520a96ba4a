"""OpenAI's response objects, whole or in chunks. What all chunks of a stream share is serialised
once. Log-probabilities have OpenAI's forms, those of prompts vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from protocol.errors import BatonError
from protocol.sampling import TokenLogprobs
from protocol.states import FinishReason
from router.dispatch.request_run import Delta, RequestRun, Score
from router.offload import encode as _encode
from router.offload import encode_in_pieces, one_line
from router.openai.errors import error_body
from router.request.generate_request import GenerateRequest, RequestKind
from router.served_model import ModelInfo
from router.text.detokenizer import TokenTable
from router.text.tool_parser import CallDelta


def logprobs_json(
    request: GenerateRequest, pieces: TokenTable, delta: Delta
) -> dict[str, Any] | None:
    """`logprobs` of a choice or of one delta of it; None if not requested."""
    if request.num_logprobs is None:
        return None
    scores = list(_shown(request, delta))
    if request.kind is RequestKind.CHAT:
        shown = [_chat_entry(s, request.num_logprobs, pieces) for s in scores if s.logprobs]
        return {"content": shown, "refusal": None}
    return {
        "tokens": [pieces[score.token].text for score in scores],
        "token_logprobs": [score.logprobs and score.logprobs.logprob for score in scores],
        "top_logprobs": [
            score.logprobs and _top_texts(score.token, score.logprobs, request.num_logprobs, pieces)
            for score in scores
        ],
        "text_offset": [score.offset for score in scores],
    }


def prompt_logprobs_json(
    request: GenerateRequest, pieces: TokenTable, delta: Delta
) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` in vLLM's form: null for the first token, then a map from token ids."""
    count = request.prompt_logprobs
    if count is None or delta.prompt_scores is None:
        return None
    return [
        None if score.logprobs is None else _by_id(score.token, score.logprobs, count, pieces)
        for score in delta.prompt_scores
    ]


def _by_id(token: int, logprobs: TokenLogprobs, count: int, pieces: TokenTable) -> dict[str, Any]:
    return {
        str(other): {"logprob": logprob, "rank": rank, "decoded_token": pieces[other].text}
        for other, logprob, rank in _ranked(token, logprobs, count)
    }


def _shown(request: GenerateRequest, delta: Delta) -> Iterator[Score]:
    if request.echoes_prompt:
        yield from delta.prompt_scores or ()
    yield from delta.scores or ()


def _chat_entry(score: Score, count: int, pieces: TokenTable) -> dict[str, Any]:
    assert score.logprobs is not None
    entry = _chat_token(score.token, score.logprobs.logprob, pieces)
    pairs = zip(score.logprobs.top_ids[:count], score.logprobs.top_logprobs, strict=False)
    entry["top_logprobs"] = [_chat_token(token, value, pieces) for token, value in pairs]
    return entry


def _chat_token(token: int, logprob: float, pieces: TokenTable) -> dict[str, Any]:
    piece = pieces[token]
    return {"token": piece.text, "logprob": logprob, "bytes": list(piece.data)}


def _top_texts(
    token: int, logprobs: TokenLogprobs, count: int, pieces: TokenTable
) -> dict[str, float]:
    """Log-probabilities by text; of tokens with the same text, the likeliest."""
    top: dict[str, float] = {}
    for other, logprob, _ in _ranked(token, logprobs, count):
        top.setdefault(pieces[other].text, logprob)
    return top


def _ranked(token: int, logprobs: TokenLogprobs, count: int) -> Iterator[tuple[int, float, int]]:
    """(token, log-probability, rank) of the likeliest, and of the token itself if it is not one."""
    ids = logprobs.top_ids[:count]
    yield from zip(ids, logprobs.top_logprobs, range(1, count + 1), strict=False)
    if token not in ids:
        yield token, logprobs.logprob, logprobs.rank


class OpenAiExchange:
    """A chat or completion and its answers (router.openai.paths.ApiExchange)."""

    def __init__(self, request: GenerateRequest, model: ModelInfo) -> None:
        self.request = request
        self._model = model

    def stream(self, run: RequestRun) -> ChunkWriter:
        return ChunkWriter(self.request, run, model=self._model)

    def whole(self, run: RequestRun, deltas: Sequence[Delta]) -> bytes:
        return answer(self.request, run, deltas, model=self._model)

    def detached(self, *_: object) -> None:
        """The connection is needed."""

    def named(self, error: BatonError) -> BatonError:
        return error


DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Writes the server-sent events of one stream."""

    def __init__(self, request: GenerateRequest, run: RequestRun, *, model: ModelInfo) -> None:
        chat = request.kind is RequestKind.CHAT
        self._request = request
        self._run = run
        self._head = _head(request, run, model=model, stream=True)
        self._usage_null = ',"usage":null' if request.include_usage else ""
        self._started: set[int] = set()
        self._before_text = ',"delta":{"content":' if chat else ',"text":'
        self._after_text = "}" if chat else ""
        self._tools = request.tool_use is not None
        content = "null" if self._tools else '""'  # there may be no text
        self._first = f',"delta":{{"role":"assistant","content":{content}}}' if chat else None
        self._continuous_usage = request.continuous_usage
        self._num_tokens = 0

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """One event for each delta; a chat choice opens with its role."""
        out: list[str] = []
        for delta in deltas:
            self._num_tokens += len(delta.token_ids)
            extra = self._extra(delta) if self._request.return_token_ids else ""
            if delta.stop is not None:
                extra += f',"stop_reason":{_encode(delta.stop)}'
            if self._first is not None and delta.index not in self._started:
                out.append(self._event(delta.index, self._first, "null", ""))
            self._started.add(delta.index)
            if self._tools or delta.reasoning:
                text = f',"delta":{_encode(_delta_json(delta))}'
            else:
                text = f"{self._before_text}{_encode(delta.text)}{self._after_text}"
            if delta.scores is None and delta.prompt_scores is None:
                out.append(self._event(delta.index, text, _finish(delta.finish), extra))
            else:
                out.append(self._scored_event(delta, text, extra))
        return one_line("".join(out)).encode()

    def last(self) -> bytes:
        """The end of the stream: usage and timeline, if requested, and [DONE]."""
        fields: list[str] = []
        if self._request.include_usage:
            fields.append(f'"usage":{_encode(self._run.usage.to_json())}')
        if self._request.timeline:
            fields.append(f'"timeline":{_encode(self._run.timeline())}')
        if not fields:
            return DONE
        return f'data: {self._head}"choices":[],{",".join(fields)}}}\n\n'.encode() + DONE

    def failed(self, error: BatonError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

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
            so_far = replace(self._run.usage, completion_tokens=self._num_tokens)
            usage = f',"usage":{_encode(so_far.to_json())}'
        return (
            f'data: {self._head}"choices":[{{"index":{index}{content},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{extra}}}]{usage}{end}}}\n\n'
        )

    def _scored_event(self, delta: Delta, text: str, extra: str) -> str:
        logprobs = encode_in_pieces(logprobs_json(self._request, self._run.token_table, delta))
        prompt, end = prompt_logprobs_json(self._request, self._run.token_table, delta), ""
        sent = self._first is not None and len(self._started) > 1  # a chat has one prompt
        if prompt is not None and not sent:
            field = f',"prompt_logprobs":{encode_in_pieces(prompt)}'
            extra, end = (extra, field) if self._first is not None else (extra + field, "")
        return self._event(delta.index, text, _finish(delta.finish), extra, logprobs, end)

    def _extra(self, delta: Delta) -> str:
        extra = f',"token_ids":{_encode(delta.token_ids)}'
        if delta.index not in self._started:
            prompt = _encode(self._run.prompts[delta.index])
            extra += f',"prompt_token_ids":{prompt}'
        return extra


def answer(
    request: GenerateRequest, run: RequestRun, deltas: Sequence[Delta], *, model: ModelInfo
) -> bytes:
    """The response of a request that is not streamed, from the one delta of each choice."""
    chat = request.kind is RequestKind.CHAT
    pieces, choices = run.token_table, list[dict[str, Any]]()
    rest: dict[str, Any] = {"choices": choices, "usage": run.usage.to_json()}
    for delta in sorted(deltas, key=lambda delta: delta.index):
        choice: dict[str, Any] = {"index": delta.index}
        choice |= {"message": _message(delta)} if chat else {"text": delta.text}
        choice["logprobs"] = logprobs_json(request, pieces, delta)
        choice["finish_reason"] = delta.finish
        if delta.stop is not None:
            choice["stop_reason"] = delta.stop
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = run.prompts[delta.index]
        prompt = prompt_logprobs_json(request, pieces, delta)
        if prompt is not None:
            (rest if chat else choice).setdefault("prompt_logprobs", prompt)
        choices.append(choice)
    if request.timeline:
        rest["timeline"] = run.timeline()
    head = _head(request, run, model=model, stream=False)
    return (head + encode_in_pieces(rest)[1:]).encode()


def _message(delta: Delta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.calls:
        message |= {"content": delta.text or None, "tool_calls": list(map(_call, delta.calls))}
    return message


def _delta_json(delta: Delta) -> dict[str, Any]:
    """The `delta` of a chat chunk: text, parts of calls, or neither."""
    fields: dict[str, Any] = {"content": delta.text} if delta.text else {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.calls:
        fields["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
    return fields


def _call(call: CallDelta) -> dict[str, Any]:
    """A call, or a later part of one, which has neither id nor name."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _head(request: GenerateRequest, run: RequestRun, *, model: ModelInfo, stream: bool) -> str:
    if request.kind is RequestKind.CHAT:
        prefix, kind = "chatcmpl", "chat.completion.chunk" if stream else "chat.completion"
    else:
        prefix, kind = "cmpl", "text_completion"
    head = {
        "id": f"{prefix}-{run.request_id}",
        "object": kind,
        "created": int(run.arrival),
        "model": model.id,
        "system_fingerprint": model.fingerprint,
    }
    if request.service_tier is not None:
        head["service_tier"] = run.tier_name
    return _encode(head)[:-1] + ","


def _finish(reason: FinishReason | None) -> str:
    return "null" if reason is None else f'"{reason.value}"'
