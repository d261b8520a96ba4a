"""KV groups in both schedulers: windows are held, cached and sent, and no more than they."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from engine.kv.allocator import BlockAllocator
from protocol.kv_layout import KVGroup
from protocol.sampling import SamplingParams
from tests.support.blocks import FINGERPRINT
from tests.support.decode_bench import Bench as DecodeBench
from tests.support.decode_bench import make_submit
from tests.support.engine import GREEDY, config, prompt, whole_runner
from tests.support.families import save_family
from tests.support.invariants import check_blocks
from tests.support.local_engine import LocalEngine
from tests.support.paged import LateSteps, expected_output
from tests.support.prefill_bench import Bench as PrefillBench
from tests.support.prefill_bench import make_submit as make_prefill
from tests.support.steps import served
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.prefix_cache import PrefixCache
from worker_runtime.scheduling.sequence import Sequence

FULL, WINDOW = KVGroup(), KVGroup(window=6)
GROUPS = {
    "full and window": (FULL, WINDOW),
    "full and three windows": (FULL, WINDOW, WINDOW, WINDOW),
    "window only": (WINDOW,),
}
CONFIG = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=8, watermark=0.0)
PROMPT = list(range(40))


def sequence(blocks: BlockAllocator, tokens: list[int]) -> Sequence:
    return Sequence.from_submit(make_submit("a", tokens), 0.0, tables=blocks.new_tables())


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("remote", [False, True])
def test_blocks_behind_the_window_are_freed(
    groups: tuple[KVGroup, ...], depth: int, remote: bool
) -> None:
    bench = DecodeBench(config=CONFIG, groups=groups, depth=depth)
    key = bench.submit(make_submit("a", PROMPT, max_tokens=30, remote=remote))
    while not bench.idle():
        bench.turn()
        bench.serve_reserves()
        (entry,) = bench.scheduler._entries.values() or (None,)
        if entry is not None and entry.sequence.num_computed > len(PROMPT):
            held = [len(ids) for ids in entry.sequence.tables.ids]
            for group, count in zip(groups, held, strict=True):
                if group.window is not None:
                    assert count <= 3  # a window of 6 and the tokens in flight touch 3 blocks of 4
    window = groups[0].window
    expected = expected_output(PROMPT, 0, 30, window)
    assert bench.output(key) == expected[remote:]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_go_on_with_the_right_tokens(
    groups: tuple[KVGroup, ...], depth: int
) -> None:
    bench = DecodeBench(config=CONFIG, groups=groups, depth=depth, num_blocks=9 + 3 * len(groups))
    prompts = [[i, *range(7 + i)] for i in range(5)]
    keys = [bench.submit(make_submit(str(i), p, max_tokens=20)) for i, p in enumerate(prompts)]
    bench.finish()
    for key, tokens in zip(keys, prompts, strict=True):
        assert bench.output(key) == expected_output(tokens, 0, 20, groups[0].window)
    if len(groups) > 1:
        assert bench.scheduler.num_preemptions > 0
    assert bench.idle()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_prefill_pushes_only_what_the_next_token_sees(groups: tuple[KVGroup, ...]) -> None:
    bench = PrefillBench(config=CONFIG, groups=groups)
    key = bench.submit(make_prefill("a", PROMPT))
    while not bench.commits:
        bench.turn()
    pushed: dict[int, list[int]] = {}
    for push in bench.pushes:
        pushed.setdefault(push.group, []).extend(
            range(push.first_block, push.first_block + len(push.block_ids))
        )
    for number, group in enumerate(groups):
        first = group.first_token(len(PROMPT)) // 4
        assert pushed[number] == list(range(first, 10))
        assert bench.pushed_tokens(key, 40, number) == PROMPT[4 * first :]


def test_prompts_that_need_the_same_blocks_later_do_not_run_together() -> None:
    """A prefill worker cannot preempt: what running prompts need at most must fit the pool."""
    groups = (FULL, WINDOW, WINDOW)
    prompt = PROMPT[1:37]  # its last chunk leaves the step room for the next prompt
    most = BlockAllocator(1, 4, groups).pages_for(37, 16)
    bench = PrefillBench(config=CONFIG, groups=groups, num_blocks=2 * most - 1)
    for name in "ab":
        bench.submit(make_prefill(name, [ord(name), *prompt]))
    while len(bench.commits) < 2:
        bench.turn()
        running = [e for e in bench.scheduler._entries.values() if e.sequence.tables]
        assert len(running) <= 1
        for commit in bench.commits:
            bench.deliver(commit.key)
    assert bench.blocks.num_held == 0


def computed(
    blocks: BlockAllocator, cache: PrefixCache, tokens: list[int], end: int | None = None
) -> Sequence:
    """A sequence whose KV was computed, of all tokens or up to `end`, in chunks of 8."""
    found = sequence(blocks, tokens)
    assert cache.allocate(found, len(tokens), chunk=8)
    end = len(tokens) if end is None else end
    while found.num_computed < end:
        count = min(8, end - found.num_computed)
        fresh = blocks.allocate(found.tables.missing(found.num_computed + count))
        assert fresh is not None
        found.tables.extend(found.num_computed + count, fresh)
        found.resume_at(found.num_computed + count)
        cache.publish(found, count)
        blocks.free(found.tables.drop_unseen(found.num_computed))
    return found


def evict(blocks: BlockAllocator, num_cached: int) -> None:
    """Take so many of the cached blocks that were freed first."""
    taken = blocks.allocate(blocks.num_free + num_cached)
    assert taken is not None
    blocks.free(taken)


def make_cache(groups: tuple[KVGroup, ...]) -> tuple[BlockAllocator, PrefixCache]:
    blocks = BlockAllocator(80, 4, groups)
    return blocks, PrefixCache(blocks, fingerprint=FINGERPRINT, enabled=True)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_hit_needs_only_the_last_window(groups: tuple[KVGroup, ...]) -> None:
    blocks, cache = make_cache(groups)
    first = computed(blocks, cache, PROMPT)
    blocks.free(first.drop_kv())
    num_windows = sum(group.window is not None for group in groups)
    evict(blocks, num_windows * 7)  # all that left the window before the end
    again = sequence(blocks, [*PROMPT, 77])
    assert cache.allocate(again, 41, chunk=8)
    assert again.num_computed == 40
    for group, ids, skipped in zip(groups, again.tables.ids, again.tables.first, strict=True):
        assert skipped == (0 if group.window is None else 8)  # tokens 35 .. 39
        assert len(ids) >= 11 - skipped
    blocks.free(again.drop_kv())
    check_blocks(blocks)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_what_others_computed_meanwhile_leaves_only_what_the_next_token_sees(
    groups: tuple[KVGroup, ...],
) -> None:
    for start, end in itertools.combinations(range(0, 41, 4), 2):
        blocks, cache = make_cache(groups)
        late = computed(blocks, cache, [*PROMPT, 77], start)
        other = computed(blocks, cache, PROMPT[:end])
        assert cache.catch_up(late)
        assert late.num_computed == end
        assert late.tables.first == [group.first_token(end) // 4 for group in groups]
        for held in (late, other):
            check_blocks(blocks)
            blocks.free(held.drop_kv())
        assert blocks.num_held == 0


def test_what_is_withdrawn_is_gone_from_lower_tiers_too() -> None:
    """Of every KV group."""
    groups = (FULL, WINDOW)
    blocks = BlockAllocator(20, 4, groups)
    tiers = KVTiers(blocks, num_slots=20, slot_bytes=1, segment_blocks=0)
    cache = PrefixCache(blocks, fingerprint=FINGERPRINT, enabled=True, tiers=tiers)
    first = sequence(blocks, PROMPT[:16])
    assert cache.allocate(first, 16)
    first.resume_at(16)
    cache.publish(first, 16)
    names = list(blocks.take_changes())
    assert len(names) == 8
    for name in names:
        slot = tiers.slots.reserve(name)
        assert slot is not None
        tiers.slots.filled(slot, ok=True)
        tiers.slots.release([slot])
    cache.withdraw(first)
    assert blocks.take_changes() == dict.fromkeys(names, False)
    assert not any(tiers.slots.knows(name) for name in names)
    assert (tiers.slots.num_used, cache.num_cached(sequence(blocks, PROMPT[:17]))) == (0, 0)


def test_without_the_window_the_hit_is_shorter() -> None:
    blocks, cache = make_cache((FULL, WINDOW))
    first = computed(blocks, cache, PROMPT)
    lost = first.tables.ids[1][-1]
    blocks.forget([lost])
    blocks.free(first.drop_kv())
    again = sequence(blocks, [*PROMPT, 77])
    assert cache.num_cached(again) == 36
    assert cache.allocate(again, 41, chunk=8)
    assert (again.num_computed, again.tables.first) == (36, [0, 7])


def test_a_handoff_reuses_blocks_though_nothing_of_the_window_is_cached() -> None:
    """Decode computes nothing itself: what prefill sends of the window is enough."""
    blocks, cache = make_cache((FULL, WINDOW))
    first = computed(blocks, cache, PROMPT)
    blocks.forget([*first.tables.ids[1]])
    blocks.free(first.drop_kv())
    longer = sequence(blocks, [*PROMPT, *range(100, 120)])
    assert cache.allocate(longer, 61, received=60)
    assert (longer.num_computed, longer.tables.first) == (40, [0, 13])
    assert [len(ids) for ids in longer.tables.ids] == [16, 3]


def test_a_block_that_was_received_in_part_is_never_shared() -> None:
    blocks, cache = make_cache((FULL, KVGroup(window=3)))
    received = sequence(blocks, PROMPT[:39])
    assert cache.allocate(received, 40, received=39)
    received.resume_at(39)
    received.tables.received(39)  # block 9 of the window holds tokens 37 and 38 only
    cache.publish(received, 39)
    received.tokens.append(39)
    received.resume_at(40)
    cache.publish(received, 1)
    blocks.free(received.drop_kv())
    assert blocks.num_cached == 10
    again = sequence(blocks, [*PROMPT, 77])
    assert cache.num_cached(again) == 0


def test_routers_hear_of_the_first_group_only() -> None:
    blocks, cache = make_cache((FULL, WINDOW))
    computed(blocks, cache, PROMPT)
    changes: dict[bytes, Any] = cache.take_changes()
    assert len(changes) == 10


async def test_steps_of_six_groups_give_the_local_engines_ids(tmp_path: Path) -> None:
    path = save_family("gemma3", tmp_path)
    seeded = SamplingParams(temperature=1.0, max_tokens=14, seed=5, ignore_eos=True)
    requests = [(prompt(n), GREEDY if n % 2 else seeded) for n in (1, 7, 8, 12, 15, 20)]
    runner = whole_runner(path, num_blocks=36)
    assert len(runner.layout.groups) == 6
    executor = LateSteps(lambda batch: runner.submit(runner.prepare(batch)).wait(), 2)
    got, num_preemptions = await served(executor, runner.layout, runner.fingerprint, requests)
    assert got == LocalEngine(config(path)).generate(requests)
    assert num_preemptions > 0
