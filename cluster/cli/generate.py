"""`baton generate` and `baton chat`: stream text over gRPC."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from baton_client import BatonClient, CallError, GenerateStream, Retry, WholeOutput
from cluster.cli.arguments import DEFAULT_GRPC
from cluster.cli.console import Console
from cluster.client_tls import client_tls
from cluster.config.schema import is_loopback
from cluster.local.local_ray import load_state
from protocol.errors import STATUSES, BatonError, ErrorCode, ErrorInfo, InvalidRequest
from protocol.timeline import Phase
from protocol.wire import inference_pb2 as wire

_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "timeout"),
    *("timeline", "ignore_eos"),
)


def run(options: argparse.Namespace, console: Console) -> None:
    with open_client(options.target or default_target(), options) as client:
        if options.command == "chat":
            _chat(client, options, console)
            return
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        show(client.generate(prompt, resume=False, **sampling(options)), console)


def open_client(address: str, options: argparse.Namespace) -> BatonClient:
    """A client of the router at `address`, with the key and certificates of the command line. The
    running cluster and loopback addresses are reached directly, not through a proxy."""
    key = options.api_key or ""
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest("--api-key must be printable ASCII", param="--api-key")
    tls = client_tls(options)
    host = address.rpartition(":")[0]
    return BatonClient(
        address,
        api_key=key,
        tls=tls.files if tls else None,
        retry=Retry(attempts=1),
        use_proxy=getattr(options, "target", None) is not None and not is_loopback(host),
    )


def default_target() -> str:
    state = load_state()
    return state.grpc if state is not None and state.grpc else DEFAULT_GRPC


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name, None) for name in _FIELDS}
    return {name: value for name, value in given.items() if value is not None}


def show(stream: GenerateStream, console: Console) -> str:
    """Print a stream as it arrives, then its timeline if the request has one; return its text.
    Raises the typed errors of the router."""
    output = stream.so_far
    try:
        for part in stream:
            console.write(part.text)
    except BaseException as error:
        if output.text:
            console.say()  # the error goes on its own line
        if isinstance(error, CallError):
            raise _typed(error) from error
        raise
    console.say()
    if output.timeline is not None:
        console.say()
        show_timeline(output, console)
    return output.text


def _typed(error: CallError) -> BatonError:
    """The error that the router named, else one with the same gRPC status."""
    code = error.code
    if code not in list(ErrorCode):
        codes = [known for known, means in STATUSES.items() if means.grpc == error.status.name]
        code = codes[0] if codes else ErrorCode.INTERNAL
    text = str(error.args[0])
    if error.status.name == "UNAVAILABLE" and not error.code:
        address, _, reason = text.partition(": ")
        text = (
            f"the router at {address} closed the connection"
            if error.token_ids
            else f"no router answers at {address} over gRPC: {reason.rpartition('last error: ')[2]}"
            " (if it wants TLS: --tls or --tls-ca)"
        )
    return ErrorInfo(code=ErrorCode(code), message=text, param=error.param).to_error()


def _chat(client: BatonClient, options: argparse.Namespace, console: Console) -> None:
    messages = [wire.Message(role="system", content=options.system)] if options.system else []

    def answer(text: str) -> None:
        messages.append(wire.Message(role="user", content=text))
        stream = client.generate(messages=messages, resume=False, **sampling(options))
        messages.append(wire.Message(role="assistant", content=show(stream, console)))

    if options.message is not None:
        answer(options.message)
        return
    console.say("Type a message; an empty line or Ctrl-D ends the conversation.")
    try:
        while text := input("> ").strip():
            answer(text)
    except EOFError:
        console.say()  # Ctrl-D leaves the cursor behind the prompt


_PHASE_NAMES: dict[str, str] = {
    Phase.TOKENIZE: "tokenise",
    Phase.ROUTE: "route",
    Phase.QUEUE: "router queue",
    Phase.CREDIT_WAIT: "wait for decode credits",
    Phase.PREFILL_QUEUE: "prefill queue",
    Phase.PREFILL: "prefill",
    Phase.TRANSFER: "KV transfer",
    Phase.DECODE_QUEUE: "wait for a decode step",
    Phase.DECODE: "decode",
    Phase.LOCAL_PREFILL: "prefill on decode",
}


def show_timeline(output: WholeOutput, console: Console) -> None:
    """Print each phase: start after arrival, duration, process, counts."""
    timeline, usage = output.timeline or wire.Timeline(), output.usage or wire.Usage()
    spans = sorted(timeline.spans, key=lambda span: (span.start, span.end))
    rows = [
        (
            _PHASE_NAMES.get(span.phase, span.phase),
            f"{1e3 * (span.start - timeline.arrival):.1f}",
            f"{1e3 * (span.end - span.start):.1f}",
            span.place or "router",
            _details(span),
        )
        for span in spans
    ]
    console.table(("PHASE", "AT MS", "FOR MS", "WHERE", "WHAT"), rows)
    console.say(_summary(timeline, usage))


def _details(span: wire.Span) -> str:
    parts = [_count(name, span.counts[name]) for name in sorted(span.counts)]
    return ", ".join(filter(None, [*parts, span.note]))


def _count(name: str, value: int) -> str:
    if name == "bytes":
        return f"{value / 1e6:.2f} MB" if value >= 100_000 else f"{value} bytes"
    return f"{value} {name if value != 1 else name.removesuffix('s')}"


def _summary(timeline: wire.Timeline, usage: wire.Usage) -> str:
    first = timeline.first_token - timeline.arrival
    total = timeline.end - timeline.arrival
    text = f"first token after {1e3 * first:.0f} ms, all after {1e3 * total:.0f} ms"
    rest = usage.completion_tokens - 1
    if rest > 0 and total > first:
        text += f", {1e3 * (total - first) / rest:.1f} ms per further token"
    tokens = f"{usage.prompt_tokens} prompt + {usage.completion_tokens} output tokens"
    return f"{tokens}: {text}"
