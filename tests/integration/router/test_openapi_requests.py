"""The OpenAPI document is true: requests made from it, good and bad, get answers it describes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from protocol.ids import Role
from router.openai.document import openapi_document
from router.request.endpoints import ChatRequest, CompletionRequest
from router.request.generate_request import GenerateRequest
from tests.support.router_front_ends import open_front_ends
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import write_model_text

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)
DOCUMENT = openapi_document(version="0", names=["tiny"], context=512, vocab_size=512, strict=False)
OPERATIONS = [
    (path, method)
    for path, item in DOCUMENT["paths"].items()
    for method in item
    if method != "parameters" and path != "/metrics"  # asks every worker each time
]

_CHAT = [{"role": "user", "content": "abc"}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _CHAT},
    "/v1/completions": {"prompt": "abc"},
    "/v1/responses": {"input": "abc"},
    "/v1/responses/input_tokens": {"input": "abc"},
    "/v1/messages": {"messages": _CHAT, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": _CHAT},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [1]},
}
EDGES: tuple[Any, ...] = ("", [], {}, [""], [[]], [{}], -1, 0, 0.5, 1.5, 1 << 31, 1 << 63, True)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router over stub workers on a loop of its own, as schemathesis calls from outside one."""
    model_folder = write_model_text(tmp_path_factory.mktemp("model"))
    found: list[str] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        fleet = StubFleet()
        for role in Role:
            await fleet.add(role)
        async with open_front_ends(fleet, model_folder, default_timeout_s=60.0) as front_ends:
            found.append(front_ends.url)
            ready.set()
            await stop.wait()
        await fleet.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    loop.close()


@pytest.fixture(scope="module")
def schema(url: str) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_field_that_is_served_is_described(kind: type[GenerateRequest]) -> None:
    schema = DOCUMENT["components"]["schemas"][kind.__name__]
    assert schema["properties"].keys() == set(kind.__struct_fields__)


@pytest.mark.parametrize("path", LEAST)
def test_bounds_of_every_field_hold(url: str, path: str) -> None:
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    whole = body["schema"] | {"components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(whole)
    fields = DOCUMENT["components"]["schemas"][body["schema"]["$ref"].split("/")[-1]]["properties"]
    validator.validate(LEAST[path])
    refused = 0
    with requests.Session() as session:
        for field in fields:
            for value in EDGES:
                asked = LEAST[path] | {field: value}
                if validator.is_valid(asked):
                    continue
                answer = session.post(url + path, json=asked, timeout=60)
                unknown = field == "model" and isinstance(value, str)
                status = HTTPStatus.NOT_FOUND if unknown else HTTPStatus.BAD_REQUEST
                assert answer.status_code == status, (asked, answer.text)
                refused += 1
    assert refused > len(fields)


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_requests_made_from_it(
    schema: schemathesis.BaseSchema, path: str, method: str, mode: str
) -> None:
    operation = schema[path][method.upper()]
    modes = {m.value: m for m in schemathesis.GenerationMode}
    session, statuses = requests.Session(), Counter[int]()
    if mode == "negative" and (method != "post" or "{" in path):
        return  # nothing in it can be wrong

    @settings(
        max_examples=40 if method == "post" else 3,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=modes[mode]))
    def check(case: schemathesis.Case) -> None:
        response = case.call(session=session, timeout=120)
        if response.status_code == HTTPStatus.GATEWAY_TIMEOUT and case.body.get("timeout"):
            return  # as asked
        case.validate_response(response, checks=list(CHECKS))
        statuses[response.status_code] += 1

    check()
    if mode == "positive" and "{" not in path:
        assert statuses[200]
