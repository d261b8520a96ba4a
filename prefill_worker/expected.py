"""When prompts that wait should have been computed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prefill_worker.lifecycle import PrefillEntry
from worker_runtime.scheduling.step_model import StepModel, StepWork


def expected(
    line: list[PrefillEntry],
    starts_at: float,
    model: StepModel,
    *,
    max_tokens: int,
    room: Callable[[PrefillEntry, int], int],
) -> Iterator[tuple[PrefillEntry, int, float]]:
    """Of prompts in the order in which they run, from `starts_at` on: tokens left, and the end of
    the step that computes the last of them. Steps are filled as `room` says (tokens that one with
    so many has for a prompt); prompts of more than `max_tokens` count as one step."""
    while line:
        step: list[tuple[PrefillEntry, int]] = []
        later: list[PrefillEntry] = []
        used = num_pairs = 0
        for entry in line:
            start = entry.sequence.num_launched + entry.num_cached
            left = len(entry.sequence.tokens) - start
            if step and room(entry, used) < left <= max_tokens:
                later.append(entry)
                continue
            step.append((entry, left))
            used += left
            num_pairs += left * start + left * left // 2
        starts_at += model.predict(StepWork(num_prompt_tokens=used, num_pairs=num_pairs))
        yield from ((entry, left, starts_at) for entry, left in step)
        line = later
