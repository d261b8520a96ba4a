"""Outputs over workers that give back, move, change, fail and vanish at random: each client gets
its tokens once and in order, or one typed error in time, and nothing is left anywhere."""

from __future__ import annotations

from collections import Counter

import pytest

from observability import metrics
from tests.support.router_world import run_world


def run(seed: int, monkeypatch: pytest.MonkeyPatch, fault_rate: float) -> Counter[str]:
    """What happened in a few worlds."""
    seen: Counter[str] = Counter()
    for world in (
        run_world(each, 40, monkeypatch, fault_rate=fault_rate, unrest=2.0)
        for each in range(10 * seed, 10 * seed + 5)
    ):
        seen["given back"] += world.given_back.total()
        seen["moved"] += int(world.count(metrics.MOVES, outcome="moved"))
        for end in ("failed", "lost"):
            for role in ("prefill", "decode"):
                seen[end] += int(world.count(metrics.RESUMES, cause=f"{role}_{end}"))
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_change_lose_no_output(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run(seed, monkeypatch, 0.0)
    assert seen["given back"] > 0
    assert seen["moved"] > 0
    assert seen["failed"] == 0


@pytest.mark.parametrize("fault_rate", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(10, 12))
def test_whatever_fails_tokens_are_right_and_nothing_is_left(
    seed: int, fault_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run(seed, monkeypatch, fault_rate)
    assert min(seen["given back"], seen["failed"] + seen["lost"]) > 0
