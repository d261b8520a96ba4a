"""Thoughts: taken out of a text the same in whatever pieces it comes, and allowed by grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from grammar.compiler import Compiler
from grammar.matcher import compute_masks
from grammar.vocabulary import load_vocabulary
from protocol.ids import Role
from protocol.sampling import Grammar
from router.text.reasoning import Reasoning, ReasoningFormat, Thinking, detect_reasoning
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, open_front_ends
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import CHATML, byte_level, write_model_text

THINK, HARMONY = ReasoningFormat.THINK, ReasoningFormat.HARMONY
BEFORE, INSIDE, AFTER = Thinking.BEFORE, Thinking.INSIDE, Thinking.AFTER
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'

#: (format, where the output begins, output, thoughts, answer)
OUTPUTS = [
    (THINK, BEFORE, "<think>\nhm\n\nso\n</think>\n\nYes.", "hm\n\nso", "Yes."),
    (THINK, BEFORE, "\n<think>hm</think>Yes.\n\nNo.", "hm", "Yes.\n\nNo."),
    (THINK, BEFORE, " \n Yes <think>no</think>", "", " \n Yes <think>no</think>"),
    (THINK, BEFORE, "<think></think>", "", ""),
    (THINK, BEFORE, "<think>cut short </th", "cut short </th", ""),
    (THINK, BEFORE, "<thi", "", "<thi"),
    (THINK, BEFORE, "", "", ""),
    (THINK, INSIDE, "\nhm\n</think>\nYes.", "hm", "Yes."),
    (THINK, INSIDE, "a < b </think", "a < b </think", ""),
    (THINK, AFTER, "\nYes </think>", "", "\nYes </think>"),
    (ReasoningFormat.MISTRAL, BEFORE, "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    (
        HARMONY,
        BEFORE,
        "<|channel|>analysis<|message|>hm <b> so<|end|><|start|>assistant<|channel|>final"
        "<|message|>Yes <|b.<|return|>",
        "hm <b> so",
        "Yes <|b.",
    ),
    (HARMONY, BEFORE, "<|channel|>final<|message|>Yes.", "", "Yes."),
    (HARMONY, BEFORE, "<|channel|>analysis<|message|>cut <|en", "cut <|en", ""),
    (HARMONY, BEFORE, "Yes, no channel.", "", "Yes, no channel."),
    (
        HARMONY,
        BEFORE,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        f"Let me see.<|end|><|start|>assistant{CALL}",
        "hm",
        f"Let me see.<|start|>assistant{CALL}",
    ),
]


def split(form: ReasoningFormat, thinking: Thinking, pieces: list[str]) -> tuple[str, str]:
    splitter = Reasoning(form, {}).splitter(thinking)
    found = [splitter.push(piece, last=False) for piece in pieces]
    found.append(splitter.push("", last=True))
    thoughts, answers = zip(*found, strict=True)
    return "".join(thoughts), "".join(answers)


@pytest.mark.parametrize(("form", "thinking", "output", "thought", "answer"), OUTPUTS)
def test_thoughts_are_split_off(
    form: ReasoningFormat, thinking: Thinking, output: str, thought: str, answer: str
) -> None:
    assert split(form, thinking, [output]) == (thought, answer)
    assert split(form, thinking, list(output)) == (thought, answer)


MARKS = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "analysis", "\n", "a", "<"]


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from([THINK, HARMONY]),
    thinking=st.sampled_from(list(Thinking)),
    parts=st.lists(st.sampled_from(MARKS), max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_pieces_do_not_matter(
    form: ReasoningFormat, thinking: Thinking, parts: list[str], cuts: list[int]
) -> None:
    text, places = "".join(parts), sorted({0, *cuts})
    pieces = [text[a:b] for a, b in zip(places, [*places[1:], len(text)], strict=True)]
    assert split(form, thinking, [*pieces]) == split(form, thinking, [text])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<think>' }}", THINK),
        ("x.split('</think>')", THINK),
        ("<seed:think>", ReasoningFormat.SEED),
        ("[THINK]", ReasoningFormat.MISTRAL),
        ("<|channel|>final<|message|>", HARMONY),
        (CHATML, ReasoningFormat.NONE),
    ],
)
def test_templates_show_the_format(template: str, form: ReasoningFormat) -> None:
    assert detect_reasoning(template) is form


def test_only_a_message_that_goes_on_leaves_a_thought_open() -> None:
    reasoning = Reasoning(THINK, {"<think>": 1, "</think>": 2})
    prompt = [1, *range(10, 60)]

    def decode(ids: Sequence[int]) -> str:
        return "x" * len(ids)

    assert reasoning.thinking(prompt, decode) is BEFORE
    assert reasoning.thinking(prompt, decode, continues=True) is INSIDE
    assert reasoning.thinking([*prompt, 2, 9], decode, continues=True) is BEFORE


# --- through a router ----------------------------------------------------------------------------

QWEN = CHATML.replace(
    "assistant\\n' }}{% endif %}",
    "assistant\\n' }}{% if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else "
    "'<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
)
END = 2


def tokenizer(*, special: bool) -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken("</think>", special=special)])
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["plain marks", "special marks"])
def thinking_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("thinking")
    return write_model_text(folder, template=QWEN, tokenizer=tokenizer(special=request.param))


@pytest.fixture
async def front_ends(fleet: StubFleet, thinking_folder: Path) -> Any:
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with open_front_ends(fleet, thinking_folder) as front_ends:
        yield front_ends


def say(front_ends: FrontEnds, text: str) -> int:
    """Let workers write this; the number of its tokens, the end included."""
    ids = front_ends.router._model.text.encode(text)
    front_ends.say([*ids, END])
    return len(ids) + 1


HI = [{"role": "user", "content": "hi"}]
OUTPUT = "<think>\nhm\n</think>\n\nYes."


async def test_chat(front_ends: FrontEnds) -> None:
    count = say(front_ends, OUTPUT)
    body: dict[str, Any] = {"messages": HI}
    _, whole = await front_ends.post("/v1/chat/completions", body)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    usage = whole["usage"]
    assert usage["completion_tokens"] == count
    thoughts = len(front_ends.router._model.text.encode("<think>\nhm\n</think>"))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thoughts}
    async with front_ends.http.post(
        front_ends.url + "/v1/chat/completions", json=body | {"stream": True}
    ) as response:
        events = [json.loads(line[6:]) for line in (await response.text()).split("\n\n")[:-2]]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    _, hidden = await front_ends.post("/v1/chat/completions", body | {"include_reasoning": False})
    assert hidden["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
    }
    assert hidden["usage"] == usage


async def test_completions_are_left_as_they_are(front_ends: FrontEnds) -> None:
    say(front_ends, "<think>hm")
    _, answer = await front_ends.post("/v1/completions", {"prompt": "a", "max_tokens": 4})
    assert answer["choices"][0]["text"] == "<think>hm"


@pytest.mark.parametrize(
    ("thinking", "said", "parts"),
    [(True, "hm</think>Yes.", ("hm", "Yes.")), (False, "Yes.", (None, "Yes."))],
)
async def test_the_prompt_may_begin_or_end_the_thought(
    front_ends: FrontEnds, thinking: bool, said: str, parts: tuple[str | None, str]
) -> None:
    say(front_ends, said)
    body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": thinking}}
    _, answer = await front_ends.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == parts


async def test_other_apis_show_thoughts_in_their_form(front_ends: FrontEnds) -> None:
    import anthropic
    import openai

    say(front_ends, OUTPUT)
    async with (
        anthropic.AsyncAnthropic(base_url=front_ends.url, api_key="none") as claude,
        openai.AsyncOpenAI(base_url=front_ends.url + "/v1", api_key="none") as gpt,
    ):
        fields: Any = {"model": "tiny", "max_tokens": 100, "messages": HI}
        model = front_ends.router.config.model_name
        fields["model"] = model
        message = await claude.messages.create(**fields)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "hm"
        async with claude.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text"]
        assert (streamed.content[0].thinking, streamed.content[1].text) == ("hm", "Yes.")
        hidden = await claude.messages.create(
            **fields, thinking={"type": "adaptive", "display": "omitted"}
        )
        assert [block.type for block in hidden.content] == ["text"]
        response = await gpt.responses.create(model=model, input="hi")
        reasoning, text = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
        assert text.content[0].text == response.output_text == "Yes."
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        async with gpt.responses.stream(model=model, input="hi") as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert "response.reasoning_text.done" in kinds
        assert [item.type for item in final.output] == ["reasoning", "message"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": SCHEMA}, '{"a": 1}', "Yes"),
    ({"guided_regex": "[a-c/]+"}, "ab/c", "Yes"),
    ({"guided_choice": ["yes", "né"]}, "né", "no"),
    ({"guided_grammar": 'start: "a" b\nb: "c"'}, "ac", "ab"),
]


def accepts(front_ends: FrontEnds, grammar: Grammar, output: str) -> bool:
    """Whether the masks of the grammar that a worker was given allow the output and its end."""
    vocabulary = load_vocabulary(Path(front_ends.router.config.model_path), 512)
    assert vocabulary is not None
    matcher = Compiler(vocabulary).start(grammar, ends=[END])
    for token in [*front_ends.router._model.text.encode(output), END]:
        if matcher.error or matcher.mask is None or not matcher.mask[token >> 3] >> (token & 7) & 1:
            return False
        matcher.take([token])
        compute_masks([matcher])
    return True


@pytest.mark.parametrize(("fields", "good", "bad"), FORMS)
async def test_the_form_begins_behind_the_thought(
    front_ends: FrontEnds, fields: dict[str, Any], good: str, bad: str
) -> None:
    say(front_ends, good)
    for thinking, thought, wrong in (
        (None, "<think>free {text</think>\n\n", "<thin"),
        (None, "", "hm"),
        (True, "free <b>\n</think>", "free"),
        (False, "", "<think>hm</think>"),
    ):
        for worker in front_ends.fleet.workers:
            worker.submitted.clear()
        kwargs = {} if thinking is None else {"enable_thinking": thinking}
        body = {"messages": HI, "max_tokens": 20, "chat_template_kwargs": kwargs} | fields
        status, answer = await front_ends.post("/v1/chat/completions", body)
        assert status == 200, answer
        grammar = front_ends.fleet.workers[-1].submitted[0].grammar
        assert grammar is not None
        assert accepts(front_ends, grammar, thought + good)
        assert not accepts(front_ends, grammar, thought + bad)
        assert not accepts(front_ends, grammar, wrong + good)


async def test_a_grammar_that_refers_to_its_start_cannot_come_behind_a_thought(
    front_ends: FrontEnds,
) -> None:
    body = {"messages": HI, "guided_grammar": 'start: "a" | "(" start ")"'}
    status, answer = await front_ends.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "guided_grammar")


TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
HERMES = Path(__file__).parents[4] / "deploy" / "templates" / "chatml_tools.jinja"


async def test_forced_calls_come_behind_the_thought(fleet: StubFleet, tmp_path: Path) -> None:
    await fleet.add(Role.DECODE)
    folder = write_model_text(tmp_path, tokenizer=tokenizer(special=False))
    settings: Any = {"chat_template": str(HERMES), "reasoning_format": "think"}
    async with open_front_ends(fleet, folder, **settings) as front_ends:
        call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        say(front_ends, f"<think>hm</think>\n{call}")
        body = {"messages": HI, "tools": [TOOL], "tool_choice": "required"}
        _, answer = await front_ends.post("/v1/chat/completions", body)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "hm"
        (made,) = choice["message"]["tool_calls"]
        assert made["function"] == {"name": "f", "arguments": '{"a": 1}'}
        grammar = fleet.workers[0].submitted[0].grammar
        assert grammar is not None
        assert accepts(front_ends, grammar, f"<think>hm</think>\n{call}")
        assert accepts(front_ends, grammar, call)
        assert not accepts(front_ends, grammar, f"hm{call}")


async def test_a_configured_format_that_does_not_exist(make_front_ends: MakeFrontEnds) -> None:
    with pytest.raises(ValueError, match="reasoning_format must be one of think"):
        async with make_front_ends(StubFleet(), reasoning_format="loud"):
            pass


CHANNELS = CHATML.replace("assistant\\n' }}", "assistant' }}") + (
    "{# <|channel|>final<|message|> {{ tools }} #}{% if tools %}{{ tools | tojson }}{% endif %}"
)


async def test_channels_and_calls_through_a_router(fleet: StubFleet, tmp_path: Path) -> None:
    await fleet.add(Role.DECODE)
    made = byte_level()
    made.add_tokens([AddedToken(mark, special=True) for mark in HARMONY.marks])
    folder = write_model_text(tmp_path, tokenizer=made, template=CHANNELS)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>Yes.<|return|>"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    async with open_front_ends(fleet, folder) as front_ends:
        body: dict[str, Any] = {"messages": HI, "max_tokens": 120}
        for fields in ({}, {"tools": [TOOL]}):
            say(front_ends, thought + final)
            _, answer = await front_ends.post("/v1/chat/completions", body | fields)
            message = answer["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
        say(front_ends, thought + call)
        _, answer = await front_ends.post("/v1/chat/completions", body | {"tools": [TOOL]})
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", None)
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        fleet.workers[0].submitted.clear()
        say(front_ends, thought + final.replace("Yes.", '{"a": 1}'))
        await front_ends.post("/v1/chat/completions", body | {"guided_json": SCHEMA})
        grammar = fleet.workers[0].submitted[0].grammar
        assert grammar is not None
        form = '<|channel|>final<|message|>{"a": 1}'
        assert accepts(front_ends, grammar, thought + form)
        assert accepts(front_ends, grammar, form)
        assert not accepts(front_ends, grammar, '{"a": 1}')


async def test_limits_hold_behind_the_thought(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, reasoning_format="think") as front_ends:
        for limits in ({"allowed_token_ids": [7, 511]}, {"bad_words": ["start"]}):
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **limits}
            status, answer = await front_ends.post("/v1/chat/completions", body)
            assert status == 200, answer
    for submit in fleet.workers[0].submitted:
        assert submit.grammar is not None
        assert submit.grammar.source.startswith("start: thought? answer\n")
