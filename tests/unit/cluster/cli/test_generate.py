"""`baton generate` against a stub router."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from baton_client import BatonClient
from cluster.cli.arguments import make_parser
from cluster.cli.console import Console
from cluster.cli.generate import open_client, run, sampling, show
from protocol.errors import ContextTooLong, Internal, InvalidRequest, Overloaded, Unavailable
from protocol.wire import inference_pb2 as wire


class Servicer:
    def __init__(self) -> None:
        self.requests: list[wire.GenerateRequest] = []
        self.breaks = False
        self.failure: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None

    def generate(self, request: wire.GenerateRequest, context: Any) -> Iterator[Any]:
        self.requests.append(request)
        if self.failure is not None:
            code, details, trailers = self.failure
            context.set_trailing_metadata(trailers)
            context.abort(code, details)
        yield wire.GenerateResponse(choices=[wire.Choice(text="Hello", token_ids=[1])])
        yield wire.GenerateResponse(choices=[wire.Choice(text="", token_ids=[2])])
        if self.breaks:
            context.abort(grpc.StatusCode.INTERNAL, "it broke")
        choice = wire.Choice(text=" you", token_ids=[3], finish_reason="stop")
        usage = wire.Usage(prompt_tokens=5, completion_tokens=3)
        timeline = wire.Timeline(request_id="r", arrival=10.0, first_token=10.25, end=10.45)
        timeline.spans.add(phase="transfer", start=10.2, end=10.3, place="prefill-1").counts[
            "bytes"
        ] = 2_500_000
        timeline.spans.add(phase="tokenize", start=10.0, end=10.001).counts["tokens"] = 1
        timeline.spans.add(phase="route", start=10.001, end=10.002, note="why")
        timeline.spans.add(phase="novelty", start=10.3, end=10.4)
        yield wire.GenerateResponse(choices=[choice], usage=usage, timeline=timeline)


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def address(servicer: Servicer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generate = grpc.unary_stream_rpc_method_handler(
        servicer.generate,
        request_deserializer=wire.GenerateRequest.FromString,
        response_serializer=wire.GenerateResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("baton.v1.Inference", {"Generate": generate})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture
def client(address: str) -> Iterator[BatonClient]:
    with opened(address) as client:
        yield client


def opened(address: str, *options: str) -> BatonClient:
    return open_client(address, make_parser().parse_args(["generate", "hi", *options]))


def shown(client: BatonClient, **fields: Any) -> str:
    return show(client.generate("hi", resume=False, **fields), Console())


def test_stream(client: BatonClient, servicer: Servicer) -> None:
    stream = client.generate("hi", resume=False, max_tokens=3, temperature=0.0, stop=("x", "y"))
    assert [part.text for part in stream] == ["Hello", "", " you"]
    output = stream.so_far
    assert (output.token_ids, output.finish_reason) == ([[1, 2, 3]], "stop")
    assert output.usage is not None
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (5, 3)
    request = servicer.requests[0]
    assert (request.prompt, request.max_tokens, list(request.stop)) == ("hi", 3, ["x", "y"])
    assert request.HasField("temperature")
    assert not request.HasField("top_p")


def test_chat_sends_the_messages(address: str, servicer: Servicer) -> None:
    options = make_parser().parse_args(
        ["chat", "hi", "--system", "be brief", "--target", address, "--max-tokens", "3"]
    )
    assert sampling(options) == {"max_tokens": 3}
    run(options, Console())
    sent = servicer.requests[0].chat.messages
    assert [(m.role, m.content) for m in sent] == [("system", "be brief"), ("user", "hi")]


@pytest.mark.parametrize(
    ("code", "trailers", "error"),
    [
        ("INVALID_ARGUMENT", {"baton-error-code": "invalid_request"}, InvalidRequest),
        ("INVALID_ARGUMENT", {"baton-error-code": "context_length_exceeded"}, ContextTooLong),
        ("RESOURCE_EXHAUSTED", {"baton-error-code": "overloaded"}, Overloaded),
        ("INVALID_ARGUMENT", {}, InvalidRequest),
        ("INVALID_ARGUMENT", {"baton-error-code": "from the future"}, InvalidRequest),
        ("UNAVAILABLE", {"baton-error-code": "unavailable"}, Unavailable),
    ],
)
def test_errors_arrive_typed(
    client: BatonClient,
    servicer: Servicer,
    code: str,
    trailers: dict[str, str],
    error: type[Exception],
) -> None:
    named = (*trailers.items(), ("baton-error-param", "top_p"))
    servicer.failure = (grpc.StatusCode[code], "top_p must be less", named)
    with pytest.raises(error, match="top_p must be less") as caught:
        shown(client)
    assert len(servicer.requests) == 1
    assert type(caught.value) is error
    assert caught.value.param == "top_p"


def test_no_router_listens() -> None:
    message = r"^no router answers at 127.0.0.1:1 over gRPC: .*refused \(if it wants TLS: "
    with opened("127.0.0.1:1") as client, pytest.raises(Unavailable, match=message):
        shown(client)


@pytest.mark.parametrize("given", [True, False])
def test_loopback_and_the_running_cluster_are_reached_without_a_proxy(
    given: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    target = ["--target", address] if given else []
    with opened(address, *target) as client:
        assert shown(client) == "Hello you"


def test_other_targets_are_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    target = "router.invalid:9000"
    with (
        opened(target, "--target", target) as client,
        pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"),
    ):
        shown(client)


def test_timeline_is_shown_in_order(
    client: BatonClient, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(client, timeline=True)
    text, _, *lines = capsys.readouterr().out.splitlines()
    assert text == "Hello you"
    assert [line.split("  ")[0] for line in lines[1:5]] == [
        "tokenise",
        "route",
        "KV transfer",
        "novelty",
    ]
    assert lines[1].split()[1:] == ["0.0", "1.0", "router", "1", "token"]
    assert lines[2].endswith("router     why")
    assert "200.0" in lines[3]
    assert "2.50 MB" in lines[3]
    assert lines[5] == (
        "5 prompt + 3 output tokens: first token after 250 ms, all after 450 ms, "
        "100.0 ms per further token"
    )


def test_an_error_in_the_middle_of_an_answer_has_a_line_of_its_own(
    client: BatonClient, servicer: Servicer, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer.breaks = True
    with pytest.raises(Internal, match="it broke"):
        shown(client)
    assert capsys.readouterr().out == "Hello\n"
