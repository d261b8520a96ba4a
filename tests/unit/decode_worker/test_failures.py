"""Lost blocks and output that is not finite, on a decode worker."""

from __future__ import annotations

import pytest

from protocol.errors import ErrorCode
from protocol.ids import RequestKey
from tests.support.decode_bench import Bench, make_submit
from tests.support.paged import expected_output
from tests.support.scheduler_bench import not_finite_at
from worker_runtime.scheduling import messages


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("lost", ["quarantined", "leaked"])
def test_a_request_that_cannot_fit_after_blocks_were_lost_holds_up_no_other(
    lost: str, remote: bool
) -> None:
    """Also long after `starvation_s`; once the blocks are back it runs."""
    bench = Bench(num_blocks=10)
    blocks = bench.blocks.allocate(3)
    assert blocks is not None
    if lost == "quarantined":
        bench.blocks.quarantine(blocks)
        bench.submit(make_submit("running", [7], max_tokens=27))  # holds blocks all the time
    else:
        bench.check = lambda: None  # type: ignore[method-assign]
    large = bench.submit(make_submit("large", [1] * 30, max_tokens=2, remote=remote))
    bench.now += 100.0
    for i in range(5):
        small = bench.submit(make_submit(f"small{i}", [i, i], max_tokens=3, remote=remote))
        assert lost == "leaked" or bench.scheduler.load().free_blocks > 0
        for _ in range(5):
            bench.turn()
            bench.serve_reserves()
        assert len(bench.output(small)) == 3 - remote
    assert bench.output(large) == []
    if lost == "quarantined":
        bench.blocks.unquarantine(blocks)
    else:
        bench.blocks.free(blocks)
    bench.finish()
    assert bench.output(large) == expected_output([1] * 30, 0, 2)[remote:]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bad_row", [2, 9, 12])  # in the first chunk, the second, of the output
def test_a_row_that_is_not_finite_ends_its_request_and_leaves_no_kv(
    bad_row: int, depth: int
) -> None:
    bench = Bench(depth=depth)
    prompt = list(range(12))
    not_finite_at(bench, RequestKey("bad"), bad_row)
    bad = bench.submit(make_submit("bad", prompt, max_tokens=6))
    good = bench.submit(make_submit("good", [9, 9, 9], max_tokens=20))
    bench.finish()
    assert [(f.key, f.error.code, f.retriable) for f in bench.failures] == [
        (bad, ErrorCode.INTERNAL, False)
    ]
    assert "float32" in bench.failures[0].error.message
    assert bench.output(good) == expected_output([9, 9, 9], 0, 20)
    assert len(bench.output(bad)) == max(0, bad_row - 11)
    assert bench.scheduler.counters()[messages.NON_FINITE] == 1
    again = bench.submit(make_submit("again", [*prompt, 77], max_tokens=1))
    bench.finish()
    assert bench.prompts[again] == 0
    assert bench.idle()
