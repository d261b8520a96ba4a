"""Clients that ask a live cluster without a pause, and what they saw."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.client import GenerateOutcome, InferenceClient
from protocol.errors import BatonError
from tests.cluster.conftest import MODEL, Baton
from tests.support.front_ends import FrontEnds

LONG = "The history of the city begins with its rivers, and " * 12
TOKENS = 24


def answer(client: InferenceClient, prompt: str, *, tokens: int = TOKENS) -> GenerateOutcome:
    outcome = GenerateOutcome()
    options = {
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "timeline": True,
        "timeout": 120.0,
    }
    for _ in client.complete(prompt, options, outcome):
        pass
    return outcome


def ask(baton: Baton, prompt: str, *, tokens: int = 8) -> GenerateOutcome:
    """One answer, by a client of its own."""
    client = InferenceClient(str(baton.state()["grpc"]))
    outcome = answer(client, prompt, tokens=tokens)
    client.close()
    return outcome


async def ask_all(baton: Baton, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The greedy ids after every prompt, alternating between the front ends, sixteen at a time."""
    state = baton.state()
    front_ends = FrontEnds(str(state["http"]), str(state["grpc"]), MODEL)
    limit = asyncio.Semaphore(16)

    async def ask(number: int) -> list[int]:
        async with limit:
            front_end = front_ends.over_grpc if number % 2 else front_ends.over_http
            return await front_end(prompts[number], tokens, temperature=0.0)

    try:
        return await asyncio.gather(*(ask(i) for i in range(len(prompts))))
    finally:
        await front_ends.close()


def wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.5)


@dataclass
class Load:
    """Clients that ask without a pause; what came back and when."""

    expected: list[int]
    finished: int = 0
    wrong: list[list[int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    worst_gap_s: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, address: str) -> None:
        client = InferenceClient(address)
        options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "timeout": 120.0}
        while not self.stop.is_set():
            outcome, last, worst = GenerateOutcome(), 0.0, 0.0
            try:
                for _ in client.complete(LONG, options, outcome):
                    now = time.monotonic()
                    worst = max(worst, now - last) if last else worst
                    last = now
            except BatonError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            with self.lock:
                self.finished += 1
                self.worst_gap_s = max(self.worst_gap_s, worst)
                if outcome.token_ids != self.expected:
                    self.wrong.append(outcome.token_ids)
        client.close()


@contextmanager
def load(live: Baton, expected: list[int], *, clients: int) -> Iterator[Load]:
    running = Load(expected=expected)
    address = str(live.state()["grpc"])
    threads = [threading.Thread(target=running.ask, args=(address,)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        running.stop.set()
        for thread in threads:
            thread.join(120)
