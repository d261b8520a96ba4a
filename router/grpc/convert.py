"""Between the messages of baton.v1 and the router's own values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import structs

from protocol.errors import InvalidRequest
from protocol.wire import inference_pb2 as pb
from router.admin import ClusterInfo, WorkerInfo
from router.dispatch.output_stream import Delta, Score
from router.request import fields as read
from router.request.chat_messages import MAX_MESSAGES, check_items
from router.request.generate_request import MAX_PROMPTS, GenerateRequest, RequestKind
from router.request.tools import MAX_TOOLS
from router.text.token_table import TokenTable

_INPUTS = ("prompt", "prompt_token_ids", "prompts", "chat")
#: Items of a field, or bytes of what is unknown, that are looked at one by one.
_MANY = 1 << 16
_TOOLS = ("tools", "tool_choice")


def generate_fields(request: pb.GenerateRequest) -> tuple[RequestKind, dict[str, Any]]:
    """The fields that are set, named as the HTTP door names them, and the kind of request."""
    check_known(request)
    fields = _set_fields(request, skip=(*_INPUTS, *_TOOLS)) | _tool_fields(request)
    fields.setdefault("stream", True)
    kind = request.WhichOneof("input")
    if kind == "chat":
        return RequestKind.CHAT, fields | {"messages": _messages(request.chat)}
    if kind == "prompt":
        fields["prompt"] = request.prompt
    elif kind == "prompt_token_ids":
        fields["prompt"] = request.prompt_token_ids.ids
    elif kind == "prompts":
        read.check_count(request.prompts.prompts, MAX_PROMPTS, "prompt")
        fields["prompt"] = [_prompt(prompt) for prompt in request.prompts.prompts]
    return RequestKind.COMPLETION, fields


def tokenize_fields(request: pb.TokenizeRequest) -> dict[str, Any]:
    """The fields that are set."""
    check_known(request)
    fields = _set_fields(request, skip=("chat", *_TOOLS)) | _tool_fields(request)
    if request.WhichOneof("input") == "chat":
        fields["messages"] = _messages(request.chat)
    return fields


def detokenize_fields(request: pb.DetokenizeRequest) -> dict[str, Any]:
    """The fields that are set; no tokens are an empty array."""
    check_known(request)
    return _set_fields(request, skip=("tokens",)) | {"tokens": request.tokens}


def check_known(message: Message) -> None:
    """Raise InvalidRequest when a newer client has set a field this build does not know."""
    name = message.DESCRIPTOR.name
    if message.ByteSize() > _MANY:  # listing millions of fields would take seconds
        known = type(message)()
        known.CopyFrom(message)
        known.DiscardUnknownFields()
        extra = message.ByteSize() - known.ByteSize()
        if extra > _MANY:
            raise InvalidRequest(f"{name} has {extra} bytes of unknown fields", param=name)
    fields = UnknownFieldSet(message)
    unknown = sorted(fields[i].field_number for i in range(len(fields)))
    if unknown:
        raise InvalidRequest(
            f"{name} has unknown fields: {', '.join(map(str, unknown))}",
            param=f"{name}.{unknown[0]}",
        )


def _set_fields(message: Message, skip: Sequence[str] = ()) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        if descriptor.name in skip:
            continue
        if descriptor.is_repeated:
            read.check_count(value, _MANY, descriptor.name)
        if isinstance(value, Message):
            check_known(value)
            fields[descriptor.name] = _set_fields(value)
        elif descriptor.message_type is not None:  # a map
            fields[descriptor.name] = dict(value)
        elif descriptor.is_repeated:
            fields[descriptor.name] = list(value)
        else:
            fields[descriptor.name] = value
    return fields


def _prompt(prompt: pb.Prompt) -> str | Sequence[int] | None:
    kind = prompt.WhichOneof("kind")
    if kind is None:
        return None
    return prompt.text if kind == "text" else prompt.token_ids.ids


def _messages(chat: pb.Chat) -> list[dict[str, Any]]:
    read.check_count(chat.messages, MAX_MESSAGES, "messages")
    check_items(len(message.parts) + len(message.tool_calls) for message in chat.messages)
    return [_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages)]


def _message(message: pb.Message, path: str) -> dict[str, Any]:
    check_known(message)
    fields: dict[str, Any] = {"role": message.role or None}
    if message.HasField("name"):
        fields["name"] = message.name
    if message.HasField("tool_call_id"):
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.HasField("content"):
        if message.parts:
            raise InvalidRequest(f"{path}: give content or parts", param=f"{path}.parts")
        fields["content"] = message.content
    elif message.parts:
        fields["content"] = [
            {"type": part.type, "text": part.text if part.HasField("text") else None}
            for part in message.parts
        ]
    return fields


def _tool_call(call: pb.ToolCall) -> dict[str, Any]:
    check_known(call)
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_fields(request: pb.GenerateRequest | pb.TokenizeRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.tools:
        read.check_count(request.tools, MAX_TOOLS, "tools")
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.HasField("tool_choice"):
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    return fields


def _tool(tool: pb.Tool, path: str) -> dict[str, Any]:
    check_known(tool)
    function = _set_fields(tool)
    if tool.HasField("parameters"):
        param = f"{path}.function.parameters"
        try:
            function["parameters"] = json.loads(tool.parameters)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{param} is not valid JSON", param=param) from None
    return {"type": "function", "function": function}


def _tool_choice(choice: pb.ToolChoice) -> str | dict[str, Any] | None:
    check_known(choice)
    kind = choice.WhichOneof("kind")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.function}}
    return choice.mode if kind == "mode" else {}


def choice_message(delta: Delta, *, token_ids: bool) -> pb.Choice:
    """One delta, less its log-probabilities."""
    return pb.Choice(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids if token_ids else (),
        finish_reason=None if delta.finish is None else delta.finish.value,
        tool_calls=[
            pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in delta.calls
        ],
    )


def add_logprobs(
    choice: pb.Choice, delta: Delta, request: GenerateRequest, pieces: TokenTable
) -> None:
    """Add the log-probabilities of a delta that the request asks for."""
    prompt = delta.prompt_scores or ()
    if request.logprobs is not None:
        shown = (*(prompt if request.echo else ()), *(delta.scores or ()))
        choice.logprobs.extend(_logprob(score, request.logprobs, pieces) for score in shown)
    if request.prompt_logprobs is not None:
        count = request.prompt_logprobs
        choice.prompt_logprobs.extend(_logprob(score, count, pieces) for score in prompt)


def _logprob(score: Score, count: int, pieces: TokenTable) -> pb.TokenLogprob:
    piece, logprobs = pieces[score.token], score.logprobs
    message = pb.TokenLogprob(
        token_id=score.token, token=piece.text, bytes=piece.data, text_offset=score.offset
    )
    if logprobs is None:
        return message
    message.logprob, message.rank = logprobs.logprob, logprobs.rank
    pairs = zip(logprobs.top_ids[:count], logprobs.top_logprobs, strict=False)
    for rank, (token, logprob) in enumerate(pairs, start=1):
        piece = pieces[token]
        message.top.add(
            token_id=token, token=piece.text, bytes=piece.data, logprob=logprob, rank=rank
        )
    return message


def cluster_message(view: ClusterInfo) -> pb.Cluster:
    """A view of the cluster."""
    return pb.Cluster(
        model=view.model,
        pools=[
            pb.Pool(role=pool.role, target=pool.target, workers=map(_worker, pool.workers))
            for pool in view.pools
        ],
        routers=[pb.RouterInfo(**asdict(router)) for router in view.routers],
    )


def _worker(worker: WorkerInfo) -> pb.Worker:
    ref = structs.asdict(worker.ref)
    del ref["role"]  # of the whole pool
    shown = pb.Worker.DESCRIPTOR.fields_by_name
    load = {name: n for name, n in structs.asdict(worker.load).items() if name in shown}
    return pb.Worker(**ref, **load, state=worker.state, in_flight=worker.in_flight)
