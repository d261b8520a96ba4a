"""The product files that one streamed completion enters (`python scripts/request_path.py`).

A router, a prefill and a decode worker run in this process on a tiny random model, connected as in
production without Ray: HTTP, control connections, KV transfer over a link. A profile hook on every
thread records each Python function of the product that is called between the first byte of an HTTP
request and the last token of its stream. The request is a plain one that takes the whole path:
`POST /v1/completions`, streamed; prefill computes its prompt in two chunks and hands it off.

Requests of the same form warm up the stack first. A file counts if every one of several measured
requests, each with its own prompt, enters it: timers (heartbeats, load reports) fall into only some
of them. Code without Python frames (C, kernels) is not seen; the module level of a file counts only
if a request imports it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CHUNK = 32  # tokens in a step
PROMPT = 48  # tokens: two chunks
OUTPUT = 8  # tokens
WARM_UPS, MEASURED = 2, 4

Function = tuple[str, str]  # file below the root, qualified name


class Recorder:
    """The code objects that are called while `recording`, on all threads started meanwhile."""

    def __init__(self) -> None:
        self.recording = False
        self._called: set[CodeType] = set()

    def install(self) -> None:
        """Hook this thread and every thread that Python starts from now on."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def remove(self) -> None:
        """Take the hooks away."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if self.recording and event == "call":
            self._called.add(frame.f_code)

    def take(self, is_product: Callable[[str], bool]) -> set[Function]:
        """The product's functions called since the last `take`."""
        called, self._called = self._called, set()
        named = ((_below_root(code.co_filename), code.co_qualname) for code in called)
        return {(path, name) for path, name in named if is_product(path)}


def _below_root(filename: str) -> str:
    return filename.removeprefix(f"{ROOT}/")


def functions_on_path(is_product: Callable[[str], bool]) -> set[Function]:
    """What every measured request calls."""
    from benchmarks.random_checkpoint import write_checkpoint

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(SHAPE, Path(folder))
        recorder.install()
        try:
            runs = asyncio.run(_measure(folder, recorder, is_product))
        finally:
            recorder.remove()
    return set.intersection(*runs)


async def _measure(
    folder: str, recorder: Recorder, is_product: Callable[[str], bool]
) -> list[set[Function]]:
    import aiohttp

    from tests.support.stack import running_stack
    from worker_runtime.config import WorkerConfig

    config = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=CHUNK)
    runs = []
    async with (
        running_stack(
            folder, dtype="bfloat16", prefill_config=config, decode_config=config
        ) as stack,
        aiohttp.ClientSession() as session,
    ):
        for number in range(WARM_UPS + MEASURED):
            recorder.recording = number >= WARM_UPS
            await _stream(session, stack.http, number)
            recorder.recording = False
            await stack.pair.idle()
            if number >= WARM_UPS:
                runs.append(recorder.take(is_product))
    return runs


async def _stream(session: object, address: str, number: int) -> None:
    """One completion; ends with its last chunk."""
    import aiohttp

    assert isinstance(session, aiohttp.ClientSession)
    body = {
        "model": "tiny",
        "prompt": [(number * PROMPT + i) % 200 + 10 for i in range(PROMPT)],
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "stream": True,
    }
    chunks = []
    async with session.post(f"http://{address}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                break
            if data:
                chunks.append(json.loads(data))
    assert any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
