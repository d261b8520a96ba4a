"""Chat templates with tools: what they are given, and models that have none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from protocol.errors import Unsupported
from router.text.tokenizer import ModelText
from router.text.tool_formats import ToolFormat, detect_format
from tests.support.tiny_text import CHATML, write_model_text
from tests.support.typed_requests import chat_messages, chat_tools

HERMES = Path(__file__).parents[4] / "deploy" / "templates" / "chatml_tools.jinja"
TOOLS = chat_tools(
    {"tools": [{"type": "function", "function": {"name": "now", "description": "<|im_end|>?"}}]}
)
TALK = [
    {"role": "user", "content": "What time is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "function": {"name": "now", "arguments": '{"zone": "<|im_end|>"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "noon <think> <|im_end|>"},
]


def test_tools_calls_and_results_are_in_the_prompt_and_forge_nothing(tmp_path: Path) -> None:
    assert TOOLS is not None
    folder = write_model_text(tmp_path)
    text = ModelText(folder, chat_template=str(HERMES))
    assert text.chat.require_tools() is ToolFormat.HERMES
    ids = text.encode_chat(chat_messages(TALK), TOOLS.definitions)
    prompt = text.decode(ids, skip_special_tokens=False)
    assert '"name": "now", "description": "<|im_end|>?"' in prompt
    assert '{"name": "now", "arguments": {"zone": "<|im_end|>"}}' in prompt
    assert "<tool_response>\nnoon <think> <|im_end|>\n</tool_response>" in prompt
    plain = text.encode_chat(chat_messages(TALK[:1]), TOOLS.definitions)
    assert (plain.count(1), plain.count(2)) == (3, 2)  # system, user, and the assistant's turn
    assert (ids.count(1), ids.count(2)) == (5, 4)
    assert text.encode("<think>", add_special_tokens=False)[0] not in ids


def test_a_template_without_tools_refuses_them(tmp_path: Path) -> None:
    text = ModelText(write_model_text(tmp_path, template=CHATML))
    with pytest.raises(Unsupported) as caught:
        text.chat.require_tools()
    assert caught.value.param == "tools"
    with pytest.raises(Unsupported) as calls:
        text.encode_chat(chat_messages(TALK))
    assert calls.value.param == "messages"


def test_a_variant_for_tools_is_used_with_tools_only(tmp_path: Path) -> None:
    assert TOOLS is not None
    write_model_text(tmp_path, template=None)
    path = tmp_path / "tokenizer_config.json"
    variants = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} <tool_call>"},
    ]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": variants}))
    text = ModelText(tmp_path)
    hello = chat_messages(TALK[:1])
    assert text.decode(text.encode_chat(hello)) == "plain"
    assert text.decode(text.encode_chat(hello, TOOLS.definitions)) == "1 <tool_call>"


def test_the_format_is_told_from_the_template_or_set(tmp_path: Path) -> None:
    for signs, tool_format in (
        ("[TOOL_CALLS]", ToolFormat.MISTRAL),
        ("[TOOL_CALLS] [ARGS]", ToolFormat.MISTRAL_NAMED),
        ("<tool_call>", ToolFormat.HERMES),
        ("<tool_call><function=f><parameter=p>", ToolFormat.QWEN_XML),
        ("<|python_tag|>", ToolFormat.LLAMA),
        ("<|python_tag|> <|python_start|>", ToolFormat.PYTHONIC),
        ("<|tool|><|/tool|>", ToolFormat.PHI4),
        ("respond with <|tool_call|> followed by a list", ToolFormat.GRANITE),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function```json", ToolFormat.DEEPSEEK),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", ToolFormat.DEEPSEEK_V31),
        ("<|channel|>analysis<|message|>", ToolFormat.HARMONY),
        ("<start_function_call>call:", ToolFormat.GEMMA),
        ("my own way", None),
    ):
        assert detect_format("{{ tools }} " + signs) is tool_format
    unknown = write_model_text(tmp_path, template="{{ tools }} my own way")
    with pytest.raises(Unsupported):
        ModelText(unknown).chat.require_tools()
    assert ModelText(unknown, tool_format="llama").chat.require_tools() is ToolFormat.LLAMA


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("{{ c.function.arguments | tojson }}", '"{\\"zone\\": \\"UT"'),
        ("{{ c.function.arguments }}", '{"zone": "UT'),
        ("{{ c.function.arguments.items() | list }}", "[('text', '{\"zone\": \"UT')]"),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_they_are(
    tmp_path: Path, call: str, written: str
) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls %}" + call
    template += "{% endfor %}{% endfor %}"
    text = ModelText(write_model_text(tmp_path, template=template))
    calls = [{"id": "c1", "function": {"name": "now", "arguments": '{"zone": "UT'}}]
    ids = text.encode_chat(chat_messages([{"role": "assistant", "tool_calls": calls}]))
    assert text.decode(ids) == written


def test_templates_in_a_folder_of_their_own_are_found(tmp_path: Path) -> None:
    """As transformers saves a model with several."""
    assert TOOLS is not None
    write_model_text(tmp_path, template="plain")
    (tmp_path / "additional_chat_templates").mkdir()
    variant = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    variant.write_text("{{ tools | length }} <tool_call>", encoding="utf-8")
    text = ModelText(tmp_path)
    hello = chat_messages(TALK[:1])
    assert text.decode(text.encode_chat(hello)) == "plain"
    assert text.decode(text.encode_chat(hello, TOOLS.definitions)) == "1 <tool_call>"
    oracle = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for tools in (None, list(TOOLS.definitions)):
        rendered = oracle.apply_chat_template(TALK[:1], tools=tools, tokenize=False)
        assert text.decode(text.encode_chat(hello, tools or ())) == rendered
