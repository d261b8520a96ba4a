"""A scheduler over tiers that are slow and fail, and the rule that chooses among them."""

from __future__ import annotations

import pytest

from kv_tiers.commands import CopyKind, Tier
from tests.support.decode_bench import make_submit
from tests.support.device_tiers import converse, recycle
from tests.support.tiers_world import World
from worker_runtime.scheduling.messages import FilesListed
from worker_runtime.scheduling.sequence import KVLoad, Sequence
from worker_runtime.scheduling.step_model import StepModel, StepWork


class QuickModel(StepModel):
    """Computing takes next to no time."""

    known = True

    def predict(self, shape: StepWork) -> float:
        return 1e-6 * shape.num_prompt_tokens


@pytest.mark.parametrize("seed", range(10))
def test_conversations_come_back_unchanged(seed: int) -> None:
    world = World(seed, faults=0.05 if seed % 2 else 0.0)
    world.run(60)
    world.check_outputs()
    assert world.ends[CopyKind.LOAD, True] > 0


def test_real_copies_between_steps_never_mix_blocks() -> None:
    assert converse("cpu", range(100, 104), count=60) > 20


def test_one_block_goes_down_and_up_thousands_of_times() -> None:
    recycle("cpu", 3000)


def test_what_the_pool_lost_comes_from_host_memory() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    world.lose_pool()
    key = world.ask(0)
    world.settle()
    world.check_outputs()
    assert world.cached[key] == 24  # of 25 + 1 to 6 tokens, whole blocks
    assert world.scheduler.snapshot().counters["kv_tier_hit_tokens_total{tier=host}"] == 24


def test_another_worker_finds_the_files_of_one_that_is_gone() -> None:
    first = World(0)
    first.ask(0, num_new=20)
    first.settle()
    second = World(0, files=first.files)
    second.histories = first.histories
    second.inbox.append(FilesListed(names=frozenset(first.files)))
    key = second.ask(0)
    second.settle()
    second.check_outputs()
    assert second.cached[key] == 24
    assert second.scheduler.snapshot().counters["kv_tier_hit_tokens_total{tier=disk}"] == 24


def test_a_load_that_hangs_is_given_up_and_computed() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    names = frozenset(world.files)
    world = World(0, files=world.files)
    world.inbox.append(FilesListed(names=names))
    key = world.ask(0, num_new=20)
    for _ in range(5):
        world.turn()
    assert not world.got[key]
    assert world.scheduler.next_deadline() < world.now + 1.0
    world.now += 1.0
    while world.turn():
        pass
    assert world.got[key] == world.wanted[key][1]
    assert world.cached[key] == 0
    counters = world.scheduler.snapshot().counters
    assert counters["kv_tier_refusals_total{tier=disk,reason=late}"] == 1
    world.settle()
    world.check_outputs()


def test_requests_with_one_prefix_load_it_once() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    world.lose_pool()
    history = list(world.histories[0])
    keys = []
    for _ in range(3):
        world.histories[0] = list(history)
        keys.append(world.ask(0))
    world.settle()
    world.check_outputs()
    assert world.ends[CopyKind.LOAD, True] == 1
    assert [world.cached[key] for key in keys] == [24, 24, 24]


def test_a_sequence_waits_for_the_block_of_a_copy_before_another_is_preempted() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    while world.turn():
        pass
    assert world.tiers.copies.num_leased_alone == 1  # a store that has not ended
    grows = world.ask(1, num_new=38, max_tokens=3)  # 11 blocks of 4, and one more for token 3
    world.ask(2, num_new=41, max_tokens=2)  # the other 12 of the 24
    while len(world.got[grows]) < 2 or world.blocks.num_available:
        world.turn()
    world.turn()
    assert len(world.got[grows]) == 2
    world.settle()
    world.check_outputs()
    assert world.decode.num_preemptions == 0


@pytest.mark.parametrize("received", [True, False])
def test_what_a_hand_off_brings_is_not_loaded_from_a_lower_tier(received: bool) -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    world.lose_pool()
    sequence = Sequence.from_submit(
        make_submit("a", world.histories[0]), 0.0, tables=world.blocks.new_tables()
    )
    more: dict[str, int] = {"received": 25} if received else {"chunk": 8}
    assert world.decode._cache.allocate(sequence, 26, **more)
    assert (sequence.loading is None) == received
    assert bool(world.tiers.copies.running) != received


def test_a_sequence_gives_up_a_load_that_was_its_own_and_then_one_that_it_waits_for() -> None:
    """It was preempted, and found that its own load still brings what it begins with."""
    own, other = (
        Sequence.from_submit(make_submit(name, [1]), 0.0, tables=World(0).blocks.new_tables())
        for name in "ab"
    )
    load = KVLoad(
        sequence=own,
        first=0,
        names=[b"n"],
        blocks=[3],
        tiers=[Tier.HOST],
        here=[False],
        end=1,
        began=0.0,
        cut_at=1.0,
        waiting=[other],
    )
    for sequence, wanted, waiting in (
        (own, False, [other]),
        (own, False, [other]),
        (other, False, []),
    ):
        sequence.loading = load
        if sequence is own and not load.wanted:
            load.waiting.append(own)
        load.give_up(sequence)
        assert (load.wanted, load.waiting, sequence.loading) == (wanted, waiting, None)


def test_computing_wins_over_a_slow_tier() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    world.lose_pool()
    rate = world.tiers.costs.rates
    for tier in rate.values():
        tier.begin(-1, 1000, world.now)
        tier.end(-1, 1e6, world.now, ok=True)
    world.decode._inflight.model = QuickModel()
    key = world.ask(0)
    world.settle()
    world.check_outputs()
    assert world.cached[key] == 0
    counters = world.scheduler.snapshot().counters
    assert counters["kv_tier_refusals_total{tier=host,reason=cost}"] == 1


def test_kv_that_is_not_finite_is_in_no_tier() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    assert world.files
    names = list(world.tiers.slots._slots)
    world.tiers.forget(names)
    world.settle()
    assert not world.files
    assert not any(map(world.tiers.slots.knows, names))
