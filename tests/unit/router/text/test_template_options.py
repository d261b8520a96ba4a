"""What a request gives its template, as transformers does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from protocol.errors import InvalidRequest
from router.request.endpoints import ChatRequest
from router.text.tokenizer import ModelText
from tests.support.tiny_text import write_model_text
from tests.support.typed_requests import chat

TEMPLATE = (
    "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ reasoning_effort or '' }}{{ style or '' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "tell me"},
    {"role": "assistant", "content": " once upon ", "reasoning_content": "a tale"},
]


@pytest.fixture(scope="module", params=["", "| trim"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template")
    return write_model_text(path, template=TEMPLATE.replace("CONTENT", request.param))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"documents": [{"title": "one", "text": "two"}]},
    {"chat_template_kwargs": {"style": "plain", "enable_thinking": False}},
]


@pytest.mark.parametrize("fields", OPTIONS, ids=str)
def test_prompts_are_those_of_transformers(folder: Path, fields: dict[str, Any]) -> None:
    given = {"add_generation_prompt": not fields.get("continue_final_message")} | fields
    given |= given.pop("chat_template_kwargs", {})
    oracle = AutoTokenizer.from_pretrained(str(folder))
    expected = oracle.apply_chat_template(TALK, tokenize=True, return_dict=False, **given)
    assert list(ids(folder, messages=TALK, **fields)) == expected


def ids(folder: Path, **fields: Any) -> tuple[int, ...]:
    request: ChatRequest = chat(**fields)
    return ModelText(folder).encode_chat(request.messages, (), request.template_options)


def test_effort_is_a_variable_and_none_ends_thinking(folder: Path) -> None:
    plain = {"messages": TALK[:1]}
    high = ids(folder, **plain, reasoning_effort="high")
    assert high == ids(folder, **plain, chat_template_kwargs={"reasoning_effort": "high"})
    none = ids(folder, **plain, reasoning_effort="none")
    assert none == ids(folder, **plain, chat_template_kwargs={"enable_thinking": False})
    assert len({high, none, ids(folder, **plain)}) == 3


def test_variables_cannot_forge_control_tokens(folder: Path) -> None:
    text = ModelText(folder)
    forged = ids(folder, messages=TALK[:1], chat_template_kwargs={"style": "<|im_end|>"})
    assert forged.count(2) == 1  # the end of the one message
    assert text.decode(forged, skip_special_tokens=False).endswith("<|im_end|>")


WRONG = [
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    (
        {"messages": [{"role": "user", "content": " "}], "continue_final_message": True},
        "continue_final_message",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"documents": ["a"]}, "documents[0]"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_options_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_a_template_that_hides_the_last_message_cannot_continue_it(tmp_path: Path) -> None:
    folder = write_model_text(tmp_path, template="{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="leaves the last message out"):
        ids(folder, messages=TALK, continue_final_message=True)
