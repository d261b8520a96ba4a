"""Clients that ask a live cluster again and again, and what they saw."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton_client import BatonClient, CallError, Retry, WholeOutput
from tests.cluster.conftest import MODEL, Baton
from tests.support.front_ends import FrontEnds

LONG = "The history of the city begins with its rivers, and " * 12
TOKENS = 24
#: Between an answer and the next question of a client, or what starts meanwhile finds no core free.
PAUSE_S = 0.5
NONE_READY = "no decode worker is ready"
#: Later a router has accepted a request, and waited for a worker in vain (`resume_wait_s`).
REFUSED_S = 30.0
HANG_S = 180.0
#: Requests must end by themselves: by then a test has failed.
TIMEOUT_S = 400.0


def client_of(baton: Baton) -> BatonClient:
    """A client that hides nothing: it neither repeats a call nor resumes an output."""
    return BatonClient(str(baton.state()["grpc"]), retry=Retry(attempts=1), timeout_s=TIMEOUT_S)


def answer(client: BatonClient, prompt: str, *, tokens: int = TOKENS) -> WholeOutput:
    return client.generate(
        prompt, resume=False, max_tokens=tokens, temperature=0.0, ignore_eos=True, timeline=True
    ).answer()


def ask(baton: Baton, prompt: str, *, tokens: int = 8) -> WholeOutput:
    """One answer, by a client of its own."""
    with client_of(baton) as client:
        return answer(client, prompt, tokens=tokens)


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


def wait_until(condition: Callable[[], bool], *, seconds: float = HANG_S) -> None:
    """Return when it holds; what takes longer than that hangs, on a busy machine too."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.5)


@dataclass
class Load:
    """Clients that ask again and again; what came back and when."""

    expected: list[int]
    may_refuse: bool = False  # what comes while no decode worker is ready
    finished: int = 0
    wrong: list[list[int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    worst_gap_s: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, baton: Baton) -> None:
        with client_of(baton) as client:
            while not self.stop.is_set():
                self._ask(client)
                self.stop.wait(PAUSE_S)

    def _ask(self, client: BatonClient) -> None:
        last = worst = 0.0
        began = time.monotonic()
        stream = client.generate(
            LONG, resume=False, max_tokens=TOKENS, temperature=0.0, ignore_eos=True
        )
        try:
            for _ in stream:
                now = time.monotonic()
                worst = max(worst, now - last) if last else worst
                last = now
        except CallError as error:
            at_once = not last and time.monotonic() - began < REFUSED_S
            if not (self.may_refuse and at_once and NONE_READY in str(error)):
                self.errors.append(str(error))
            return
        with self.lock:
            self.finished += 1
            self.worst_gap_s = max(self.worst_gap_s, worst)
            if stream.so_far.token_ids != [self.expected]:
                self.wrong.extend(stream.so_far.token_ids)


@contextmanager
def load(
    live: Baton, expected: list[int], *, clients: int, may_refuse: bool = False
) -> Iterator[Load]:
    running = Load(expected=expected, may_refuse=may_refuse)
    threads = [threading.Thread(target=running.ask, args=(live,)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        running.stop.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
