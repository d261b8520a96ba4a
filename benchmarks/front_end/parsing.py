"""Time from a request's body to the typed request, and how long parsing a large body holds up other
threads.

    python -m benchmarks.front_end.parsing
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

from protocol.errors import InvalidRequest
from router.request.body import Body
from router.request.endpoints import ChatRequest, CompletionRequest
from router.request.parse import parse_json

_LARGE_BYTES = 8 << 20
_POLL_S = 0.0002
_SENTENCE = "The capital of Norway is Oslo, where about 700,000 people live. "
_CHAT: dict[str, Any] = {
    "model": "llama",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": _SENTENCE},
        {"role": "assistant", "content": _SENTENCE},
        {"role": "user", "content": "And of Sweden?"},
    ],
    "temperature": 0.7,
    "top_p": 0.95,
    "max_tokens": 256,
    "seed": 7,
    "stop": ["\n\n"],
    "stream": True,
    "stream_options": {"include_usage": True},
}
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": _PARAMETERS}}
_SMALL: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "chat of 4 messages": (ChatRequest, _CHAT),
    "the same with null fields": (ChatRequest, {**_CHAT, "seed": None, "user": None, "n": None}),
    "the same with a tool": (ChatRequest, {**_CHAT, "tools": [_TOOL]}),
    "completion": (CompletionRequest, {"prompt": _SENTENCE, "max_tokens": 64, "stream": True}),
    "15,000 token ids": (CompletionRequest, {"prompt": list(range(1000, 16000))}),
}


def _filled(item: str, head: str, tail: str) -> bytes:
    """A body of the largest size, filled with one item."""
    count = (_LARGE_BYTES - len(head) - len(tail)) // len(item.encode())
    return (head + item * count + tail).encode()


_LARGE: dict[str, bytes] = {
    "text": _filled(_SENTENCE, '{"prompt":"', '"}'),
    "text of escapes": _filled("\\n", '{"prompt":"', '"}'),
    "token ids of 5 digits": _filled("12345,", '{"prompt":[', "1]}"),
    "token ids of 1 digit": _filled("1,", '{"prompt":[', "1]}"),
    "256 prompts of ids": _filled("[" + "12345," * 5460 + "1],", '{"prompt":[', "[1]]}"),
    "empty objects": _filled("{},", '{"prompt":"a","guided_json":{"enum":[', "{}]}}"),
}


def _time_us(call: Callable[[], object]) -> float:
    call()
    clock = time.thread_time  # processor time
    count = max(1, int(0.02 / min(timeit.repeat(call, timer=clock, number=1, repeat=3))))
    return min(timeit.repeat(call, timer=clock, number=count, repeat=40)) / count * 1e6


def _hold_up_ms(body: bytes) -> float:
    """The longest time a polling thread waits while another parses a body, in processor time of the
    parsing thread: a busy machine counts little."""
    parsed = threading.Event()

    def parse() -> None:
        with contextlib.suppress(InvalidRequest):  # over the bound on structure
            parse_json(body, CompletionRequest)
        parsed.set()
        time.sleep(0.05)  # its clock ends with it

    parsing = threading.Thread(target=parse)
    parsing.start()
    assert parsing.ident is not None
    clock = time.pthread_getcpuclockid(parsing.ident)
    longest, last = 0.0, time.clock_gettime(clock)
    while not parsed.is_set():
        time.sleep(_POLL_S)
        now = time.clock_gettime(clock)
        longest, last = max(longest, now - last), now
    parsing.join()
    return longest * 1000


def main() -> None:
    print("| body | us |\n| --- | --- |")
    for name, (kind, fields) in _SMALL.items():
        parse = partial(parse_json, json.dumps(fields).encode(), kind)
        print(f"| {name} | {_time_us(parse):.1f} |")
    print("\n| 8 MiB of | longest hold-up, ms (median, worst of 9) |\n| --- | --- |")
    for name, body in _LARGE.items():
        hold_ups = sorted(_hold_up_ms(body) for _ in range(9))
        print(f"| {name} | {hold_ups[4]:.1f}, {hold_ups[-1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
