"""Deadlines of calls that cannot carry one."""

import contextlib
import threading
import time
import weakref
from functools import partial

import pytest

from kv_transfer.cuda.nccl import Watch


@pytest.fixture
def watch():
    watch = Watch("test-watch")
    yield watch
    watch.close()


@pytest.mark.parametrize("error", [None, KeyError])
def test_what_ends_in_time_is_left_alone(watch, error):
    """Whether it fails or not."""
    rung, in_time = set(), set()
    for number in range(50):
        limit = time.monotonic() + 0.05
        with contextlib.suppress(KeyError), watch.guard(limit, partial(rung.add, number)):
            if error is not None:
                raise error
        if time.monotonic() < limit:  # as always, but for a machine that stands still
            in_time.add(number)
    time.sleep(0.15)
    assert in_time
    assert not rung & in_time


def test_what_overruns_is_ended_in_the_order_of_deadlines(watch):
    rung = []
    both = threading.Event()

    def ring(name):
        rung.append((name, time.monotonic()))
        if len(rung) == 2:
            both.set()

    now = time.monotonic()
    with (
        watch.guard(now + 30, lambda: ring("late")),
        watch.guard(now + 0.2, lambda: ring("second")),
        watch.guard(now + 0.1, lambda: ring("first")),
    ):
        assert both.wait(60)
    assert [name for name, _ in rung] == ["first", "second"]
    assert rung[0][1] >= now + 0.1
    assert rung[1][1] >= now + 0.2


def test_what_was_ended_is_not_kept(watch):
    closed, gone = threading.Event(), threading.Event()

    class Link:
        def close(self):
            closed.set()

    link = Link()
    weakref.finalize(link, gone.set)
    with watch.guard(time.monotonic(), link.close):
        assert closed.wait(60)
    del link
    assert gone.wait(60)


def test_sections_of_many_threads(watch):
    rung = set()

    def work(index):
        done = threading.Event()
        limit = 0.02 if index % 2 else 1000.0
        with watch.guard(time.monotonic() + limit, lambda: (rung.add(index), done.set())):
            if index % 2:
                assert done.wait(60)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert rung == {index for index in range(16) if index % 2}
