"""Lost blocks and output that is not finite, on a prefill worker."""

from __future__ import annotations

import pytest

from protocol.errors import ErrorCode
from protocol.ids import RequestKey
from tests.support.prefill_bench import Bench, make_submit
from tests.support.scheduler_bench import not_finite_at
from worker_runtime.scheduling import messages
from worker_runtime.scheduling.messages import HandoffEnded


@pytest.mark.parametrize("lost", ["quarantined", "leaked"])
def test_a_prompt_that_cannot_fit_after_blocks_were_lost_holds_up_no_other(lost: str) -> None:
    bench = Bench(num_blocks=10)
    blocks = bench.blocks.allocate(3)
    assert blocks is not None
    if lost == "quarantined":
        bench.blocks.quarantine(blocks)
        sending = bench.submit(make_submit("sending", [7]))  # holds a block all the time
        bench.turn()
    else:
        bench.check = lambda: None  # type: ignore[method-assign]
    large = bench.submit(make_submit("large", list(range(36))))
    bench.now += 100.0
    for i in range(5):
        small = bench.submit(make_submit(f"small{i}", [i, i], max_tokens=1))
        for _ in range(3):
            bench.turn()
        assert bench.tokens[-1].key == small
        bench.tell(HandoffEnded(key=small, error=None))
    if lost == "quarantined":
        bench.blocks.unquarantine(blocks)
        bench.deliver(sending)
    else:
        bench.blocks.free(blocks)
    while bench.turn():
        pass
    assert bench.tokens[-1].key == large


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bad_row", [2, 9])  # in the first chunk, in the second
def test_a_prompt_that_is_not_finite_fails_and_leaves_no_kv(bad_row: int, depth: int) -> None:
    bench = Bench(depth=depth)
    prompt = list(range(12))
    not_finite_at(bench, RequestKey("bad"), bad_row)
    bad = bench.submit(make_submit("bad", prompt))
    good = bench.submit(make_submit("good", [9, 9, 9]))
    while bench.turn():
        pass
    assert [(f.key, f.error.code, f.retriable) for f in bench.failures] == [
        (bad, ErrorCode.INTERNAL, False)
    ]
    assert [(end.key, end.released) for end in bench.ends] == [(bad, False)]
    assert [commit.key for commit in bench.commits] == [good]
    assert [event.key for event in bench.tokens] == [good]
    assert bench.scheduler.counters()[messages.NON_FINITE] == 1
    bench.tell(HandoffEnded(key=bad, error=None))
    again = bench.submit(make_submit("again", [*prompt, 77]))
    while bench.turn():
        pass
    assert bench.prompts[again] == 0
