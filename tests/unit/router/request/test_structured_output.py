"""Structured output as clients ask for it on both front ends, and as workers get it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from protocol.errors import InvalidRequest
from protocol.ids import Role
from protocol.sampling import Grammar, GrammarKind
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters, until
from tests.support.stub_workers import StubFleet
from tests.support.typed_requests import completion
from tests.support.wire_requests import to_message

HI = [{"role": "user", "content": "hi"}]
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(OBJECT)


def schema(value: object) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(value))


SAME: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, schema({"type": "object"})),
    ({"structured_outputs": {"json_object": True}}, schema({"type": "object"})),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": TEXT}}},
        schema(OBJECT),
    ),
    ({"guided_json": TEXT}, schema(OBJECT)),
    ({"structured_outputs": {"json": TEXT}}, schema(OBJECT)),
    ({"guided_regex": "[ab]+"}, Grammar(kind=GrammarKind.REGEX, source="[ab]+")),
    (
        {"structured_outputs": {"choice": ["yes", "été"]}},
        Grammar(kind=GrammarKind.CHOICE, source='["yes", "été"]'),
    ),
    (
        {"guided_grammar": 'start: "a"'},
        Grammar(kind=GrammarKind.LARK, source='start: "a"'),
    ),
]


@pytest.mark.parametrize(("fields", "grammar"), SAME, ids=lambda value: str(value)[:50])
async def test_both_front_ends_tell_both_workers_the_same(
    front_ends: FrontEnds, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    body = {"prompt": "hello there, how are you", "max_tokens": 3, **fields}
    assert (await front_ends.post("/v1/completions", body))[0] == 200
    async for _ in front_ends.inference.Generate(to_message(body), timeout=60):
        pass
    submitted = [submit for worker in front_ends.fleet.workers for submit in worker.submitted]
    assert len(submitted) == 4
    assert [submit.grammar for submit in submitted] == [grammar] * 4


def test_a_schema_may_be_an_object_as_well_as_text() -> None:
    for fields in (
        {"guided_json": OBJECT},
        {"structured_outputs": {"json": OBJECT}},
        {"response_format": {"type": "json_object", "schema": OBJECT}},
    ):
        asked = completion(**fields).structured
        assert asked is not None
        assert asked.form == schema(OBJECT)


class Address(BaseModel):
    street: str
    zip: int


class Person(BaseModel):
    """A person."""

    name: str
    age: int | None
    homes: list[Address]


async def test_the_official_clients_parse_helper(front_ends: FrontEnds) -> None:
    answer = '{"name": "Ann", "age": null, "homes": [{"street": "x", "zip": 12}]}'
    front_ends.say([*letters(answer), 2])
    async with AsyncOpenAI(
        base_url=front_ends.url + "/v1", api_key="none", max_retries=0
    ) as client:
        parsed = await client.chat.completions.parse(
            model="tiny", messages=HI, response_format=Person
        )
        assert parsed.choices[0].message.parsed == Person(
            name="Ann", age=None, homes=[Address(street="x", zip=12)]
        )
        async with client.chat.completions.stream(
            model="tiny", messages=HI, response_format=Person
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed.name == "Ann"
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(
                model="tiny",
                messages=HI,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"uniqueItems": True}},
                },
            )
        assert refused.value.param == "response_format.json_schema.schema"
        assert "uniqueItems" in refused.value.message
    grammar = front_ends.fleet.workers[1].submitted[0].grammar
    assert grammar is not None
    assert json.loads(grammar.source)["properties"].keys() == {"name", "age", "homes"}


async def test_a_refused_grammar_reaches_no_worker_and_delays_no_request(
    front_ends: FrontEnds,
) -> None:
    """Costly ones are compiled in a thread: health checks between them are answered."""
    costly = [{"guided_choice": [f"{i}-{'word' * 12}-{j}" for j in range(3000)]} for i in range(6)]
    nasty = [
        {"guided_regex": "((a{40}){40}){40}"},
        {"guided_json": {"enum": [f"value {i}" for i in range(60_000)]}},
        {"guided_json": {"anyOf": [{"not": {"type": "null"}}] * 2000}},
        {"guided_grammar": "start: " + "a | " * 20_000 + '"a"'},
    ]

    async def ask(fields: dict[str, Any]) -> int:
        body = {"prompt": "hello", "max_tokens": 2, **fields}
        return (await front_ends.post("/v1/completions", body))[0]

    running = [asyncio.create_task(ask(fields)) for fields in (*costly, *nasty)]
    while not all(task.done() for task in running):
        async with front_ends.http.get(front_ends.url + "/health") as response:
            assert response.status == 200
        await asyncio.sleep(0.005)
    assert [task.result() for task in running] == [200] * 6 + [400] * 4
    assert sum(len(worker.submitted) for worker in front_ends.fleet.workers) == 6


async def test_a_lost_output_is_taken_up_under_the_same_grammar(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    bad = await fleet.add(Role.DECODE, fail_after=3)
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": "hello", "max_tokens": 6, "guided_regex": "[a-z]+"}
        running = asyncio.create_task(front_ends.post("/v1/completions", body))
        await until(lambda: bad.submitted)
        good = await fleet.add(Role.DECODE)
        front_ends.router.set_workers(fleet.refs)
        assert (await running)[0] == 200
    first, second = bad.submitted[0], good.submitted[0]
    assert (len(second.output_ids), second.key.attempt) == (3, 1)
    assert second.grammar == first.grammar
    assert second.grammar is not None


async def test_what_a_worker_finds_wrong_names_the_clients_field(front_ends: FrontEnds) -> None:
    for worker in front_ends.fleet.workers:
        worker.fail_after, worker.fail_retriable = 1, False
        worker.fail_error = InvalidRequest("grammar: no way on", param="grammar")
    for field in ("guided_regex", "guided_grammar"):
        body = {"prompt": "hello there", field: 'start: "ab"'}
        status, answer = await front_ends.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert answer["error"]["message"] == f"{field}: no way on"


async def test_a_known_grammar_waits_for_no_other_and_a_deadline_holds_while_it_is_tried(
    front_ends: FrontEnds,
) -> None:
    body = {"prompt": "hello there", "max_tokens": 2, "guided_regex": "[a-z]+"}
    assert (await front_ends.post("/v1/completions", body))[0] == 200
    front_ends.router.warm_up()
    blocked = threading.Event()
    front_ends.router._model.grammars._thread.submit(blocked.wait)
    try:
        assert (await front_ends.post("/v1/completions", body))[0] == 200
        late = {**body, "guided_regex": "[b-z]+", "timeout": 0.2}
        status, answer = await front_ends.post("/v1/completions", late)
        assert (status, answer["error"]["param"]) == (504, "timeout")
    finally:
        blocked.set()
