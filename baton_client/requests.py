"""Options of a request, and the message that they make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from protocol.wire import inference_pb2 as wire

#: A prompt of a completion: text, or token ids.
Prompt = str | Sequence[int]
#: A message of a chat: `{"role": ..., "content": ...}`, or the message of the wire.
Message = Mapping[str, Any] | wire.Message


class Options(TypedDict, total=False):
    """The fields of GenerateRequest, as docs/api.md explains them. JSON Schemas may be objects."""

    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int
    echo: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    timeline: bool
    return_token_ids: bool
    priority: int
    service_tier: str
    user: str
    cache_salt: str
    cache_keep_s: float
    prompt_cache_retention: str
    truncate_prompt_tokens: int
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]
    guided_json: str | Mapping[str, Any]
    guided_regex: str
    guided_choice: Sequence[str]
    guided_grammar: str
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    include_reasoning: bool
    chat_template_kwargs: str | Mapping[str, Any]
    documents: Sequence[str | Mapping[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool


#: Fields that are the text of JSON on the wire.
_JSON = frozenset(
    {"parameters", "schema", "json", "guided_json", "chat_template_kwargs", "structural_tag"}
)


def generate_request(
    prompt: Prompt | None, messages: Sequence[Message] | None, options: Options
) -> wire.GenerateRequest:
    """The message. Raises ValueError unless there is exactly one of prompt and messages, TypeError
    for options that do not exist or have another type."""
    if (prompt is None) == (messages is None):
        raise ValueError("give a prompt or messages")
    fields = {name: _wire(name, value) for name, value in options.items()}
    if isinstance(prompt, str):
        fields["prompt"] = prompt
    elif prompt is not None:
        fields["prompt_token_ids"] = wire.TokenIds(ids=prompt)
    else:
        fields["chat"] = _chat(messages or ())
    try:
        return wire.GenerateRequest(**fields)
    except UnicodeError:  # text with half of a surrogate pair
        raise
    except ValueError as error:  # protobuf's error of an unknown field
        raise TypeError(str(error)) from None


def tokenize_request(
    prompt: str | None, messages: Sequence[Message] | None, add_special_tokens: bool | None
) -> wire.TokenizeRequest:
    request = wire.TokenizeRequest(add_special_tokens=add_special_tokens)
    if messages is not None:
        request.chat.CopyFrom(_chat(messages))
    elif prompt is not None:
        request.prompt = prompt
    return request


def _chat(messages: Sequence[Message]) -> wire.Chat:
    return wire.Chat(messages=[_message(message) for message in messages])


def _message(message: Message) -> wire.Message:
    if isinstance(message, wire.Message):
        return message
    fields = dict(message)
    if isinstance(fields.get("content"), list):
        fields["parts"] = fields.pop("content")
    if fields.get("tool_calls"):
        fields["tool_calls"] = [_call(call) for call in fields["tool_calls"]]
    return wire.Message(**{name: value for name, value in fields.items() if value is not None})


def _call(call: Any) -> Any:
    """A call as OpenAI nests it, or as the wire has it."""
    if isinstance(call, Mapping) and "function" in call:
        return {"id": call.get("id", ""), **call["function"]}
    return call


def _wire(name: str, value: Any) -> Any:
    if name == "tools":
        return [_fields(tool.get("function", tool)) for tool in value]
    if name == "tool_choice":
        if isinstance(value, str):
            return {"mode": value}
        return {"function": value.get("function", value)["name"]}
    if name == "documents":
        return [one if isinstance(one, str) else json.dumps(one) for one in value]
    return _nested(name, value)


def _nested(name: str, value: Any) -> Any:
    if name in _JSON and not isinstance(value, str):
        return json.dumps(value)
    return _fields(value) if isinstance(value, Mapping) else value


def _fields(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _nested(name, item) for name, item in value.items()}
