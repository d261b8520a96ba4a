"""Bodies: large ones, compressed ones, and those of browsers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from protocol.errors import InvalidRequest
from protocol.ids import Role
from router.offload import MAX_STRUCTURE, loads_in_pieces
from router.openai import exchange
from router.openai.exchange import BodyReader
from router.request.endpoints import CompletionRequest
from router.request.parse import parse_json
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, until
from tests.support.stub_workers import StubFleet

MANY = [(7 * i) % 50_000 for i in range(10_000)]
HELLO = {"prompt": "hello", "max_tokens": 3}


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": MANY, "n": 2},
        {"prompt": [MANY, [1, 2], MANY]},
        {"tokens": MANY},
        {"prompt": 'quoted " [1,2,3] \\', "stop": ["]", "["]},
        {"prompt": json.dumps(MANY)},
        {"prompt": json.dumps(json.dumps({"a": MANY}))},
        {"prompt": [*MANY, 1.5]},
        {"prompt": [*MANY, True]},
        {"prompt": [*MANY, None]},
        {"prompt": [*MANY, 2**70]},
        {"guided_json": {"enum": MANY, "const": [MANY]}, "prompt": MANY},
        {"prompt": [], "x": [[[]]], "y": {"a": [{}]}},
        MANY,
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_large_texts_are_read_as_the_parser_reads_them(value: object) -> None:
    text = json.dumps(value)
    read = loads_in_pieces(text)
    assert json.loads(json.dumps(read, default=array.tolist)) == json.loads(text)
    if isinstance(value, dict):
        others = {name: item for name, item in read.items() if name not in ("prompt", "tokens")}
        assert others == {name: item for name, item in value.items() if name in others}


def test_long_prompts_of_ids_are_arrays() -> None:
    request = parse_json(json.dumps({"prompt": 20 * MANY}).encode(), CompletionRequest)
    assert request.prompts == (array("q", 20 * MANY),)


@pytest.mark.parametrize("text", ["", "[1,", '{"prompt": [' + "1," * 9000 + "]}", '{"a": "\\'])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        loads_in_pieces(text)


def test_structure_has_a_bound() -> None:
    with pytest.raises(InvalidRequest, match="beside its texts"):
        loads_in_pieces("[" + "{}," * MAX_STRUCTURE + "{}]")


async def test_long_prompts_of_ids_generate(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE, num_blocks=4096)
    async with make_front_ends(fleet) as front_ends:
        ids = [i % 500 for i in range(60_000)]
        status, answer = await front_ends.post("/v1/completions", {"prompt": ids})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "60000 tokens" in answer["error"]["message"]
        padded = json.dumps({"prompt": ids[:200], "user": "x" * 200_000}).encode()
        status, answer = await front_ends.post("/v1/completions", padded)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 200)


async def post(front_ends: FrontEnds, body: bytes, encoding: str) -> tuple[int, dict, str | None]:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    url = front_ends.url + "/v1/completions"
    async with front_ends.http.post(url, data=body, headers=headers) as response:
        return response.status, await response.json(), response.headers.get("accept-encoding")


async def test_compressed_bodies(front_ends: FrontEnds) -> None:
    body = json.dumps(HELLO).encode()
    whole = gzip.compress(body)
    status, answer, _ = await post(front_ends, whole, "gzip")
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    assert (await post(front_ends, body, "identity"))[0] == 200
    for wrong in (body, whole[:-5], whole + whole, b""):
        status, answer, _ = await post(front_ends, wrong, "gzip")
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
    for encoding in ("br", "deflate", "gzip, gzip"):
        status, answer, accepted = await post(front_ends, whole, encoding)
        assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")
        assert accepted == "gzip"


async def test_a_small_body_cannot_become_a_huge_one(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, max_body_bytes=100_000) as front_ends:
        bomb = gzip.compress(b" " * 50_000_000)
        assert len(bomb) < 100_000
        status, answer, _ = await post(front_ends, bomb, "gzip")
        assert (status, answer["error"]["code"]) == (413, "payload_too_large")


async def test_no_more_is_unzipped_at_once_than_is_parsed_at_once(
    front_ends: FrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or some megabytes of requests become gigabytes that wait for a thread."""
    done: list[str] = []
    for name in ("_unzipped", "parse_json"):
        work = getattr(exchange, name)

        def noted(*arguments: object, name: str = name, work: Callable = work) -> object:
            done.append(name)
            return work(*arguments)

        monkeypatch.setattr(exchange, name, noted)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    large = gzip.compress(json.dumps(HELLO | {"user": "x" * 1_000_000}).encode())
    answers = await asyncio.gather(*(post(front_ends, large, "gzip") for _ in range(8)))
    assert {status for status, _, _ in answers} == {200}
    assert done == ["_unzipped", "parse_json"] * 8


async def test_what_has_come_of_all_bodies_is_bounded(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.add(Role.DECODE)
    bodies = BodyReader(1000)
    monkeypatch.setattr("router.openai.app.BodyReader", lambda _, strict: bodies)
    async with (
        make_front_ends(fleet, max_body_bytes=1000) as front_ends,
        contextlib.AsyncExitStack() as open_,
    ):
        for _ in range(64):
            _, writer = await asyncio.open_connection(*front_ends.router.addresses.http.split(":"))
            open_.callback(writer.close)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
            writer.write(head + b" " * 999)
        await until(lambda: bodies._unparsed_bytes == 64 * 999)
        status, answer = await front_ends.post("/v1/completions", HELLO | {"user": "x" * 100})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert (await front_ends.post("/v1/completions", {"prompt": "hi"}))[0] == 200
        await open_.aclose()
        await until(lambda: bodies._unparsed_bytes == 0)
        assert (await front_ends.post("/v1/completions", HELLO | {"user": "x" * 100}))[0] == 200


async def test_what_has_no_effect_is_not_kept(front_ends: FrontEnds) -> None:
    """While the request runs, which may be an hour."""
    gate = front_ends.fleet.workers[1].gate = asyncio.Event()
    notes = {"user": "u" * 100_001, "metadata": {"note": "m" * 100_002}}
    body = HELLO | notes | {"prompt": "hello there you", "max_tokens": 5}
    running = asyncio.create_task(front_ends.post("/v1/completions", json.dumps(body).encode()))
    await until(lambda: front_ends.fleet.workers[1].running)
    del body, notes
    mark = "m" * 100_002
    assert not [v for v in gc.get_objects() if type(v) is dict and v.get("note") == mark]
    gate.set()
    assert (await running)[0] == 200


APP = "https://app.example.com"
PREFLIGHT = {
    "origin": APP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_pages_of_other_origins_may_not_call_by_default(front_ends: FrontEnds) -> None:
    async with front_ends.http.options(
        front_ends.url + "/v1/completions", headers=PREFLIGHT
    ) as response:
        assert response.status == 405
        assert "access-control-allow-origin" not in response.headers


async def test_pages_of_configured_origins_may_call(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, cors_origins=(APP,)) as front_ends:
        url = front_ends.url + "/v1/completions"
        async with front_ends.http.options(url, headers=PREFLIGHT) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == APP
            assert "authorization" in response.headers["access-control-allow-headers"]
        async with front_ends.http.post(url, json=HELLO, headers={"origin": APP}) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == APP
        other = {"origin": "https://evil.example.com"}
        async with front_ends.http.post(url, json=HELLO, headers=other) as response:
            assert "access-control-allow-origin" not in response.headers


def test_an_origin_is_no_url(make_front_ends: MakeFrontEnds, fleet: StubFleet) -> None:
    from router.config import RouterConfig

    with pytest.raises(ValueError, match="cors_origins"):
        RouterConfig(model_path="x", cors_origins=("https://app.example.com/path",))
