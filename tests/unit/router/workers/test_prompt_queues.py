"""Which prompts leave the worker on which they wait, and where they go to."""

from __future__ import annotations

import random

import pytest

from protocol.ids import RequestKey, Role
from protocol.loads import QueuedPrompt
from protocol.messages import WorkerLoad
from router.workers.prompt_queues import PromptQueue, find_move
from worker_runtime.scheduling.prompt_order import WaitingPrompt, prompt_order

NOW = 1000.0  # on the clock of the workers
RATE = 10_000.0


def waiting(
    name: str, tokens: int, *, due_s: float, ends_s: float, begun: bool = False
) -> QueuedPrompt:
    return QueuedPrompt(
        key=RequestKey(name, 0),
        left_tokens=tokens,
        due_at=NOW + due_s,
        ends_at=NOW + ends_s,
        begun=begun,
    )


def queue(
    *prompts: QueuedPrompt,
    role: Role = Role.PREFILL,
    rate: float = RATE,
    free_s: float = 0.0,
    unseen: int = 0,
    age_s: float = 0.0,
    room: int = 10_000,
) -> PromptQueue:
    prefill = role is Role.PREFILL
    load = WorkerLoad(
        tokens_per_second=rate if prefill else 1.0,
        prompt_tokens_per_second=0.0 if prefill else rate,
        prompts=prompts,
        free_at=NOW + free_s,
        clock=NOW - age_s,
    )
    return PromptQueue(load=load, role=role, age_s=age_s, unseen_tokens=unseen, room_tokens=room)


def move(**queues: PromptQueue) -> tuple[str, str, str] | None:
    """Name of the prompt, from, to."""
    found = find_move(queues, lambda _key, _worker: True)
    return None if found is None else (found[0].request_id, found[2], found[3])


LATE = waiting("late", 500, due_s=0.1, ends_s=0.3)


@pytest.mark.parametrize("role", list(Role))
def test_a_late_prompt_goes_where_it_is_in_time(role: Role) -> None:
    assert move(a=queue(LATE), b=queue(role=role)) == ("late", "a", "b")
    assert move(a=queue(LATE), b=queue(role=role, age_s=0.5)) == ("late", "a", "b")


@pytest.mark.parametrize(
    "other",
    [
        queue(free_s=0.06),  # 50 ms of work and the way to the client follow
        queue(unseen=600),
        queue(rate=4000.0),
        queue(rate=0.0),  # unknown
        queue(room=500),
        queue(waiting("x", 100, due_s=0.09, ends_s=0.06)),  # is due before it
        queue(waiting("x", 100, due_s=0.11, ends_s=0.06)),  # would be late then
    ],
)
def test_it_stays_where_no_other_has_it_in_time(other: PromptQueue) -> None:
    assert move(a=queue(LATE), b=other) is None


def test_those_that_are_late_anyway_keep_no_prompt_away() -> None:
    other = queue(
        waiting("x", 100, due_s=0.05, ends_s=0.2), waiting("y", 100, due_s=0.2, ends_s=0.1)
    )
    assert move(a=queue(LATE), b=other) == ("late", "a", "b")


@pytest.mark.parametrize(
    "prompt",
    [
        waiting("x", 500, due_s=0.2, ends_s=0.15),  # in time
        waiting("x", 500, due_s=-0.01, ends_s=0.15),  # too late in any case
        waiting("x", 500, due_s=0.1, ends_s=0.3, begun=True),
    ],
)
def test_other_prompts_stay(prompt: QueuedPrompt) -> None:
    assert move(a=queue(prompt), b=queue()) is None


def test_a_prompt_makes_place_for_one_that_is_late() -> None:
    """The late one has begun, or is too large for the other: a smaller one before it leaves."""
    small = waiting("small", 300, due_s=0.15, ends_s=0.03)
    large = waiting("large", 900, due_s=0.12, ends_s=0.12)
    assert move(a=queue(small, large), b=queue(rate=5000.0)) == ("small", "a", "b")
    assert move(a=queue(small, large), b=queue(rate=500.0)) is None
    too_large = waiting("large", 900, due_s=0.1, ends_s=0.12)
    assert move(a=queue(small, too_large), b=queue(rate=5000.0)) is None


def test_only_prompts_that_may_leave_do_and_the_first_place_is_taken() -> None:
    queues = {"a": queue(LATE), "b": queue(free_s=0.02), "c": queue(free_s=0.01)}
    assert find_move(queues, lambda _key, _worker: False) is None
    found = find_move(queues, lambda key, worker: (key.request_id, worker) == ("late", "a"))
    assert found == (LATE.key, 500, "a", "c")


def test_a_move_never_makes_fewer_prompts_in_time() -> None:
    """Random queues, in the order in which workers run them, before and after a move."""
    rng, moved = random.Random(1), 0

    def line(jobs: list[tuple[str, int, float]], rate: float) -> list[QueuedPrompt]:
        ends, found = 0.01, []
        aims = [
            WaitingPrompt(work_s=tokens / rate, waited_s=0.0, promised_s=due_s - 0.01)
            for _, tokens, due_s in jobs
        ]
        for name, tokens, due_s in (jobs[i] for i in prompt_order(aims, ends)):
            ends += tokens / rate
            found.append(waiting(name, tokens, due_s=due_s, ends_s=ends))
        return found

    def in_time(prompts: list[QueuedPrompt]) -> int:
        return sum(p.ends_at + 0.01 <= p.due_at for p in prompts)

    for _ in range(300):
        rates = {"a": rng.choice([5000.0, 40_000.0]), "b": rng.choice([5000.0, 40_000.0])}
        jobs = {
            worker: [
                (f"{worker}{i}", rng.randrange(50, 3000), rng.uniform(0.02, 0.2))
                for i in range(rng.randrange(6))
            ]
            for worker in rates
        }
        lines = {worker: line(jobs[worker], rates[worker]) for worker in rates}
        found = find_move(
            {w: queue(*lines[w], rate=rates[w], free_s=0.01) for w in rates}, lambda *_: True
        )
        if found is None:
            continue
        moved += 1
        key, _, source, target = found
        (job,) = (each for each in jobs[source] if each[0] == key.request_id)
        jobs[source].remove(job)
        jobs[target].append(job)
        after = {worker: line(jobs[worker], rates[worker]) for worker in rates}
        assert sum(map(in_time, after.values())) > sum(map(in_time, lines.values()))
    assert moved > 30
