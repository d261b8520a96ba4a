"""Prompts that have not begun: what routers are told of them, and that they are given back."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.support.prefill_bench import Bench, make_submit
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling import messages
from worker_runtime.scheduling.messages import EndHandoff, HandoffEnded, RequestCancelled


@pytest.mark.parametrize("phase", ["expecting", "granted", "running", "sending", "ending"])
def test_a_prompt_is_given_back_until_it_has_begun(phase: str) -> None:
    bench = Bench()
    submit = make_submit("a", list(range(20)))
    key = bench.submit(submit, grant=phase != "expecting")
    for _ in range({"running": 1, "sending": 3, "ending": 1}.get(phase, 0)):
        bench.turn()
    if phase == "ending":
        bench.tell(RequestCancelled(keys=(key,)))
    num_ends = len(bench.ends)
    back = RequestCancelled(keys=(key,), unless_begun=True)
    bench.tell(back)
    bench.tell(back)
    given = phase in ("expecting", "granted")
    assert [(f.key, f.given_back, f.retriable) for f in bench.failures] == [
        (key, True, True)
    ] * given
    assert len(bench.ends) - num_ends == given
    assert bench.scheduler.counters()[messages.GIVEN_BACK] == given
    if given:
        assert bench.ends == [EndHandoff(key=key, released=True, error=None)]
        assert not bench.turn()
        bench.tell(HandoffEnded(key=key, error=None))
        assert bench.scheduler.num_unfinished == 0
        assert bench.blocks.num_available == 64


def test_prompts_are_expected_when_they_come() -> None:
    """The report names those that wait, by the model of the steps, in which the prompts are, and
    not those that run, or are due already."""
    bench = Bench(
        config=WorkerConfig(max_num_seqs=4, max_num_batched_tokens=32, fill_tokens=8), depth=2
    )
    assert bench.scheduler.load().prompts == ()
    for number in range(9):  # steps of a second, whatever is in them
        bench.submit(make_submit(f"warm{number}", [number] * (3 + number % 3)))
        bench.turn()
    names = {"a": 6, "b": 5, "c": 20, "old": 4}
    for name, count in names.items():
        submit = make_submit(name, list(range(100, 100 + count)))
        waited_s = 20.0 if name == "old" else 0.0
        bench.submit(structs.replace(submit, first_s=10.0, waited_s=waited_s))
    load = bench.scheduler.load()
    found = {p.key.request_id: p for p in load.prompts}
    assert {name: p.left_tokens for name, p in found.items()} == {"a": 6, "b": 5, "c": 20}
    assert all(p.due_at == bench.now + 10.0 and not p.begun for p in load.prompts)
    ends = [p.ends_at - bench.now for p in load.prompts]
    assert ends == sorted(ends)
    assert 0.5 < ends[0] < 1.5
    assert ends[-1] > 2 * ends[0]
    bench.turn()
    left = {p.key.request_id for p in bench.scheduler.load().prompts}
    assert left < set(found)
