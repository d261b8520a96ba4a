"""What is outstanding: no request holds back those that the workers could serve before it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import Unavailable
from protocol.ids import RequestKey, Role
from protocol.messages import WorkerLoad, size_class
from router.auth.keys import ANYONE, ServiceTier
from tests.support.admission import Bench, Ticket, Worker, soon


@dataclass
class Prefill:
    """A prefill worker on the bench's clock: the smallest prompt first, reported at each step."""

    bench: Bench
    rate: float = 100.0
    left: dict[RequestKey, float] = field(default_factory=dict)
    owners: dict[RequestKey, Ticket] = field(default_factory=dict)

    def take(self, ticket: Ticket) -> None:
        """The worker reports a request that the router has reserved."""
        self.owners[ticket.key] = ticket
        self.left[ticket.key] = float(ticket.request.work)
        worker = self.bench.workers.prefill.reservations
        worker.submitted(ticket.key, 0)

    def report(self) -> None:
        backlog = [0] * 33
        for left in self.left.values():
            backlog[size_class(int(left))] += int(left)
        self.bench.workers.report(backlog=tuple(backlog), waiting_tokens=sum(backlog))

    def run(self, seconds: float) -> None:
        tokens = self.rate * seconds
        self.bench.now += seconds
        while tokens > 0 and self.left:
            key = min(self.left, key=self.left.__getitem__)
            done = min(tokens, self.left[key])
            self.left[key] -= done
            tokens -= done
            if self.left[key] <= 0:
                del self.left[key]
                self.owners.pop(key).started()
        self.report()


async def released(ticket: Ticket) -> bool:
    """Whether a request goes to the workers without waiting."""
    task = asyncio.create_task(ticket.wait())
    await soon()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    await task
    return True


async def test_short_requests_behind_one_long_prompt_go_through() -> None:
    """A prompt of 70 s; then one of 0.4 s every two seconds, in a tier that promises 2 s."""
    bench = Bench(dispatch_window_s=2.0)
    bench.workers.decode.capacity_tokens = 100_000
    prefill = Prefill(bench)
    long = bench.ticket(7000)
    await long.wait()
    prefill.take(long)
    prefill.report()
    waits = []
    for _ in range(20):
        prefill.run(2.0)
        short = bench.ticket(40, tier=ServiceTier(ttft_s=2.0))
        assert await released(short)
        prefill.take(short)
        begin = bench.now
        while short.state != "started":
            prefill.run(0.1)
        waits.append(bench.now - begin)
        short.end(1)
    assert max(waits) < 0.6
    assert long.state == "submitted"


@settings(max_examples=60, deadline=None)
@given(
    longs=st.lists(st.integers(2_000, 100_000), min_size=1, max_size=5),
    theirs=st.lists(st.integers(2_000, 100_000), max_size=5),
    short=st.integers(1, 100),
)
async def test_no_mix_of_long_prompts_holds_back_a_short_one(
    longs: list[int], theirs: list[int], short: int
) -> None:
    """Of this router, on the workers or in the queue, and of others."""
    bench = Bench(max_queued_tokens=10**9)
    bench.workers.decode.capacity_tokens = 10**9
    prefill = Prefill(bench)
    prefill.left = {RequestKey(f"theirs{i}"): float(n) for i, n in enumerate(theirs)}
    prefill.report()
    tickets = [bench.ticket(tokens, left_s=1e9) for tokens in longs]
    tasks = [asyncio.create_task(ticket.wait()) for ticket in tickets]
    await soon()
    assert await released(bench.ticket(short, tier=ServiceTier(ttft_s=2.0)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_outstanding_work_shrinks_as_it_is_computed() -> None:
    """A second long prompt goes when little is left of the first, not with its first token."""
    bench = Bench()
    bench.workers.decode.capacity_tokens = 100_000
    prefill = Prefill(bench)
    first, second = bench.ticket(7000), bench.ticket(7000)
    await first.wait()
    prefill.take(first)
    prefill.report()
    task = asyncio.create_task(second.wait())
    prefill.run(68.0)
    await soon()
    assert not task.done()
    prefill.run(1.5)
    await soon()
    assert (task.done(), first.state) == (True, "submitted")


async def test_an_idle_prefill_worker_is_enough() -> None:
    """What waits on another one is nothing to wait for."""
    bench = Bench()
    bench.workers.decode.capacity_tokens = 100_000
    idle = Worker(Role.PREFILL, WorkerLoad(tokens_per_second=100.0))
    bench.workers.prefills.append(idle)
    first, second = bench.ticket(7000), bench.ticket(7000)
    await first.wait()
    assert await released(second)


# --- decode's blocks ------------------------------------------------------------------------------


async def test_a_prompt_without_blocks_on_decode_holds_back_no_smaller_one() -> None:
    """Ten decode workers with 10,800 free tokens each, a prompt of 20,000, then 50 of 200."""
    bench = Bench(dispatch_window_s=1e9)
    bench.workers.decodes[:] = [
        Worker(Role.DECODE, WorkerLoad(), free_tokens=10_800) for _ in range(10)
    ]
    running = bench.ticket(100)
    await running.wait()
    large = asyncio.create_task(bench.ticket(20_000).wait())
    await soon()
    assert not large.done()
    assert [await released(bench.ticket(200)) for _ in range(50)] == [True] * 50
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)


async def test_blocks_count_once_whether_promised_or_reported() -> None:
    """20 prompts of 10,000 tokens, which decode has reserved and reports as used."""
    bench = Bench(dispatch_window_s=1e9)
    decode = bench.workers.decode
    decode.capacity_tokens = 394_000
    for i in range(20):
        ticket = bench.ticket(10_000, left_s=1e9)
        assert await released(ticket)
        decode.reservations.submitted(ticket.key, i + 1)
    assert decode.free_tokens == 194_000
    decode.capacity_tokens -= 200_000  # the report
    decode.reservations.reported(20)
    assert decode.free_tokens == 194_000
    assert await released(bench.ticket(190_000, left_s=1e9))
    assert not await released(bench.ticket(5_000, left_s=1e9))


async def test_a_prompt_without_blocks_goes_to_decode_after_some_seconds_one_at_a_time() -> None:
    """There it gets what becomes free; here smaller ones would take it for ever."""
    bench = Bench(dispatch_window_s=1e9)
    bench.workers.decode.capacity_tokens = 1000
    running = bench.ticket(500)
    await running.wait()
    tickets = [bench.ticket(900), bench.ticket(900)]
    tasks = [asyncio.create_task(ticket.wait()) for ticket in tickets]
    for _ in range(4):
        await soon()
        assert await released(bench.ticket(10))
        bench.now += 1.0
        bench.workers.on_report()
    assert [task.done() for task in tasks] == [False, False]
    bench.now += 1.0
    bench.workers.on_report()
    await soon()
    assert [task.done() for task in tasks] == [True, False]
    tickets[0].started()
    await soon()
    assert tasks[1].done()


# --- after cancels --------------------------------------------------------------------------------


async def test_what_was_cancelled_is_no_backlog() -> None:
    """100 s of work are cancelled. A request with a deadline of 1 s is served, though the worker
    still reports them; what other routers have sent counts on."""
    bench = Bench(dispatch_window_s=1e9)
    bench.workers.decode.capacity_tokens = 10**6
    reservations = bench.workers.prefill.reservations
    tickets = [bench.ticket(500) for _ in range(20)]
    for i, ticket in enumerate(tickets):
        await ticket.wait()
        reservations.submitted(ticket.key, i + 1)
    reservations.reported(20)
    bench.workers.report(waiting_tokens=10_000 + 150)
    with pytest.raises(Unavailable, match=r"101\.5 s of work"):
        await bench.ticket(500, left_s=1.0).wait()
    for ticket in tickets:
        reservations.release(ticket.key, cancel=True)
        ticket.end(0)
    with pytest.raises(Unavailable, match=r"1\.5 s of work"):
        await bench.ticket(500, left_s=1.0).wait()
    assert await released(bench.ticket(500, left_s=1.6))
    reservations.cancelled([ticket.key for ticket in tickets], 40)
    reservations.reported(40)
    bench.workers.report(waiting_tokens=0)
    assert await released(bench.ticket(500, ANYONE, left_s=5.1))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(20, 120), st.sampled_from([0.0, 0.9, 1.0])), min_size=10, max_size=40
    ),
    pauses=st.lists(st.sampled_from([0.1, 1.0, 8.0]), min_size=1, max_size=4),
    first_at=st.integers(0, 12),
)
async def test_no_wait_for_room_is_told_far_beyond_what_it_becomes(
    prompts: list[tuple[int, float]], pauses: list[float], first_at: int
) -> None:
    """Decode has room for some 300 tokens, sequences end one after the other. However much of the
    prompts that left first was cached, the next request is told no more than if each end made room
    for the smallest prompt alone, and the last one waited for six ends."""
    bench = Bench(dispatch_window_s=1e9)
    bench.workers.decode.capacity_tokens = 300
    bench.workers.report(tokens_per_second=1e6)
    tickets = [bench.ticket(count, cached=int(share * count)) for count, share in prompts]
    tasks = [asyncio.create_task(ticket.wait()) for ticket in tickets]
    await soon()
    last = bench.ticket(120)
    told_s = 0.0
    for step in range(10 * len(prompts)):
        if step == first_at:
            load = bench.queue._load()
            assert load is not None
            told_s = bench.queue._wait_s(last.request, load)
            tasks.append(asyncio.create_task(last.wait()))
            await soon()
        if step >= first_at and last.state == "submitted":
            break
        bench.now += pauses[step % len(pauses)]
        running = next((each for each in tickets if each.state == "submitted"), None)
        if running is not None:
            running.end(1)
        await soon()
    assert last.state == "submitted"
    sizes = [count for count, _ in prompts]
    assert told_s <= 7 * sum(sizes) / min(sizes) * max(pauses)
    for ticket in (*tickets, last):
        ticket.end(1)
    await asyncio.gather(*tasks)
    assert bench.idle
