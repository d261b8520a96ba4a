"""Prompts that wait, and when they should have been computed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from decode_worker.chunking import WaitingWork
from decode_worker.lifecycle import DecodeEntry
from worker_runtime.scheduling.entry import RequestState


def expected(
    entries: Iterable[DecodeEntry],
    starts_at: float,
    *,
    rate: Callable[[list[int]], float],
    order: Callable[[list[DecodeEntry], float], list[int]],
) -> Iterator[tuple[DecodeEntry, int, float]]:
    """Of prompts, in the order in which they run from `starts_at` on: tokens left, and when the
    last of them is computed. `rate`: tokens per second beside decode rows with so many tokens each,
    0 when unknown; `order`: of prompts at such a rate."""
    prompts, contexts = [], []
    for entry in entries:
        if entry.state in (RequestState.WAITING, RequestState.RUNNING):
            sequence = entry.sequence
            left = len(sequence.tokens) - sequence.num_launched
            if left > 1 and not sequence.num_output:
                prompts.append(entry)
            elif left < 2:
                contexts.append(sequence.num_launched)
    speed = rate(contexts) if prompts else 0.0
    if not speed:
        return
    for i in order(prompts, speed):
        sequence = prompts[i].sequence
        left = len(sequence.tokens) - sequence.num_launched
        starts_at += left / speed
        yield prompts[i], left, starts_at


def waiting_work(
    prompts: Sequence[tuple[DecodeEntry, int]], now: float, start_s: float
) -> WaitingWork:
    """Of prompts in the order in which they run, with the tokens that each has left, for a step
    that begins `start_s` from now on."""
    first = prompts[0][0].sequence
    return WaitingWork(
        num_tokens=sum(count for _, count in prompts),
        start=first.num_launched,
        prompts=((count, e.waiting_prompt(1.0, now, starved=False)) for e, count in prompts),
        start_s=start_s,
        resumes=first.num_output > 0,
    )
