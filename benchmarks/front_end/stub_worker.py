"""A prefill and a decode worker without an engine, in a process of their own.

They use the real control protocol and event publisher. Prefill answers with token 1 at once;
decode emits one token of every running sequence each step, a step every `--gap-ms`. Prints the
workers' addresses as one line of JSON, and serves until its standard input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from msgspec.structs import asdict
from tokenizers import Tokenizer

from cluster.gc_tuning import freeze_heap
from protocol.ids import RequestKey, Role, WorkerRef, new_epoch
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.messages import (
    Ack,
    Cancel,
    EventBatch,
    StatusQuery,
    Submit,
    Subscribe,
    TokenEvent,
    WorkerLoad,
    WorkerStatus,
)
from protocol.states import FinishReason, WorkerState
from rpc.methods import CANCEL, EVENTS, STATUS, SUBMIT, Handler, Method
from rpc.server import ControlServer
from worker_runtime.control.event_publisher import EventPublisher
from worker_runtime.scheduling.messages import RouterEvents

SECRET = b"front-end-benchmark"
CONTEXT = 8192
_BLOCKS = 1 << 20
_TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the "
    "season of light, it was the season of darkness. "
)
_SHAPE = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}


@dataclass(slots=True)
class _Sequence:
    key: RequestKey
    router_id: str
    left: int
    index: int = 1


@dataclass(slots=True)
class StubWorker:
    """One of the two. Every sequence repeats `tokens`."""

    role: Role
    tokens: tuple[int, ...]
    running: dict[RequestKey, _Sequence] = field(default_factory=dict)
    epoch: int = field(default_factory=new_epoch)
    ref: WorkerRef | None = None
    server: ControlServer | None = None
    peer: StubWorker | None = None
    publisher: EventPublisher = field(init=False)

    def __post_init__(self) -> None:
        self.publisher = EventPublisher(
            epoch=self.epoch,
            heartbeat_s=1.0,
            report=lambda: (WorkerState.READY, self.role, self._load()),
            on_gone=self._gone,
        )

    async def start(self) -> WorkerRef:
        """Serve on a free port."""
        handlers: dict[Method[Any, Any], Handler] = {
            SUBMIT: self._submit,
            CANCEL: self._cancel,
            STATUS: self._status,
            EVENTS: self._events,
        }
        self.server = ControlServer(handlers, secret=SECRET)
        address = await self.server.start()
        self.ref = WorkerRef(
            worker_id=self.role.value, epoch=self.epoch, role=self.role, address=address
        )
        return self.ref

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop()

    def step(self) -> None:
        """One token for every running sequence, one batch for every router."""
        events: dict[str, RouterEvents] = {}
        tokens = self.tokens
        for sequence in list(self.running.values()):
            sequence.left -= 1
            event = TokenEvent(
                key=sequence.key,
                index=sequence.index,
                token=tokens[sequence.index % len(tokens)],
                finish=None if sequence.left else FinishReason.LENGTH,
            )
            sequence.index += 1
            if not sequence.left:
                del self.running[sequence.key]
            events.setdefault(sequence.router_id, RouterEvents()).tokens.append(event)
        self.publisher.publish(events)

    async def _submit(self, submit: Submit) -> Ack:
        if self.role is Role.PREFILL:
            self._first_token(submit)
        return Ack()

    def _first_token(self, submit: Submit) -> None:
        left = submit.sampling.max_tokens - 1
        finish = None if left else FinishReason.LENGTH
        event = TokenEvent(key=submit.key, index=0, token=self.tokens[0], finish=finish)
        self.publisher.publish({submit.router_id: RouterEvents(tokens=[event])})
        if left:
            assert self.peer is not None
            sequence = _Sequence(submit.key, submit.router_id, left)
            self.peer.running[submit.key] = sequence

    async def _cancel(self, cancel: Cancel) -> Ack:
        for key in cancel.keys:
            self.running.pop(key, None)
        return Ack()

    def _events(self, subscribe: Subscribe) -> AsyncIterator[EventBatch]:
        return self.publisher.stream(subscribe.router_id)

    async def _status(self, _: StatusQuery) -> WorkerStatus:
        assert self.ref is not None
        return WorkerStatus(
            ref=self.ref,
            state=WorkerState.READY,
            role=self.role,
            load=self._load(),
            layout=KVLayout(**_SHAPE, block_size=16, num_blocks=_BLOCKS, rank_heads=((0, 1),)),  # type: ignore[arg-type]
            fingerprint=KVFingerprint(model="stub", weights="0", rope="none", **_SHAPE),  # type: ignore[arg-type]
            max_model_len=CONTEXT,
            max_prompt_tokens=CONTEXT - 1,
            steps=1,
            last_step_age_s=0.0,
        )

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            running=len(self.running),
            free_blocks=_BLOCKS,
            total_blocks=_BLOCKS,
            tokens_per_second=1e5,
        )

    def _gone(self, router_id: str) -> None:
        for key, sequence in list(self.running.items()):
            if sequence.router_id == router_id:
                del self.running[key]


async def _serve(tokens: tuple[int, ...], gap_s: float) -> None:
    prefill, decode = (StubWorker(role, tokens) for role in (Role.PREFILL, Role.DECODE))
    prefill.peer = decode
    refs = [await prefill.start(), await decode.start()]
    print(json.dumps([asdict(ref) for ref in refs]), flush=True)
    freeze_heap()
    loop = asyncio.get_running_loop()
    closed = loop.run_in_executor(None, sys.stdin.read)
    began = loop.time()
    for number in itertools.count(1):
        await asyncio.sleep(max(0.0, began + number * gap_s - loop.time()))
        if closed.done():
            break
        decode.step()
    await asyncio.gather(prefill.stop(), decode.stop())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front_end.stub_worker")
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--gap-ms", type=float, default=20.0)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model_path / "tokenizer.json"))
    tokens = tuple(tokenizer.encode(_TEXT, add_special_tokens=False).ids)
    uvloop.run(_serve(tokens, options.gap_ms / 1000))


if __name__ == "__main__":
    main()
