"""A hand-off of a model with KV windows moves the windows, and all KV of the other layers."""

from __future__ import annotations

import pytest

from protocol.ids import RequestKey
from protocol.kv_layout import KVGroup, KVLayout
from tests.support.transfer import Pair, make_layout

KEY = RequestKey("a")
#: Gemma 3 27B: 62 layers, every sixth without a window.
GEMMA3 = (
    KVGroup(),
    *[KVGroup(window=1024, num_layers=9)] * 4,
    *[KVGroup(window=1024, num_layers=8)] * 2,
)
#: gpt-oss 20B: 24 layers, every other one without a window.
GPT_OSS = {"num_layers": 12, "groups": (KVGroup(), KVGroup(window=128))}


def layout(block_size: int, num_blocks: int, tp_size: int = 1, **changes: object) -> KVLayout:
    shape = {"num_layers": 10, "num_kv_heads": 2, "head_dim": 2, "groups": GEMMA3} | changes
    return make_layout(tp_size, block_size=block_size, num_blocks=num_blocks, **shape)


def table_of(layout: KVLayout, num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Blocks of each group, one after the other."""
    tables, first = [], 0
    for group in layout.groups:
        count = layout.blocks_for(num_tokens) - layout.granted_from(group, num_tokens)
        tables.append(tuple(range(first, first + count)))
        first += count
    return tuple(tables)


def content(group: int, slot: int, position: int) -> float:
    return float(group * 100_000 + slot * 10_000 + position)


async def hand_over(memory, source: KVLayout, dest: KVLayout, num_tokens: int) -> int:
    """Hand a prompt over and check every token that decode sees; returns the bytes sent."""
    there = source.block_size
    ids, peer_ids = table_of(source, num_tokens), table_of(dest, num_tokens)
    async with Pair(source=source, dest=dest, backends=memory) as pair:
        for number, (group, table) in enumerate(zip(source.groups, ids, strict=True)):
            skipped = source.granted_from(group, num_tokens) * there
            for pool in pair.prefill.pools:
                for position in range(skipped, num_tokens):
                    block, token = divmod(position - skipped, there)
                    for slot in range(group.num_layers or source.num_layers):
                        cell = pool.layers[slot][table[block], :, :, token]
                        cell.fill_(content(number, slot, position))
        pair.submit(KEY, dest.pages_for(num_tokens))
        await pair.receiver.reserve(KEY, peer_ids, 0, num_tokens)
        for number, (group, table) in enumerate(zip(source.groups, ids, strict=True)):
            pair.sender.push(KEY, table, source.granted_from(group, num_tokens), group=number)
        pair.sender.commit(KEY, (7,))
        await pair.prefill.events.wait(lambda e: e.is_over(KEY), timeout_s=60)
        await pair.decode.events.wait(lambda e: e.is_over(KEY), timeout_s=60)
        ((_, report),) = pair.prefill.events.commits
        for number, (group, table) in enumerate(zip(dest.groups, peer_ids, strict=True)):
            skipped = dest.granted_from(group, num_tokens) * dest.block_size
            for pool in pair.decode.pools:
                for position in range(group.first_token(num_tokens), num_tokens):
                    block, token = divmod(position - skipped, dest.block_size)
                    for slot in range(group.num_layers or dest.num_layers):
                        found = pool.layers[slot][table[block], :, :, token]
                        assert (found == content(number, slot, position)).all()
        return report.num_bytes


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4), (6, 4)])
@pytest.mark.parametrize("degrees", [(1, 1), (1, 2), (2, 1)])
async def test_every_token_that_decode_sees_arrives(memory, sizes, degrees):
    groups = (KVGroup(), KVGroup(window=7), KVGroup(window=7, num_layers=1))
    source, dest = (
        layout(size, 40, tp, num_layers=2, groups=groups)
        for size, tp in zip(sizes, degrees, strict=True)
    )
    for num_tokens in (3, 16, 29):
        sent = await hand_over(memory, source, dest, num_tokens)
        per_layer = source.token_bytes() // source.num_layers
        cell = 2 if sizes == (6, 4) else 4
        start = max(0, num_tokens - 6) // cell * cell
        cells = -(-num_tokens // cell) * cell
        assert sent == per_layer * (2 * cells + 3 * (cells - start))


@pytest.mark.parametrize(
    ("shape", "layers", "share"), [({}, 62, 0.38), (GPT_OSS, 24, 0.52)], ids=["Gemma 3", "gpt-oss"]
)
async def test_a_long_prompt_sends_little_more_than_its_whole_layers(memory, shape, layers, share):
    source = dest = layout(16, 256 + 6 * 65, num_kv_heads=1, head_dim=1, **shape)
    sent = await hand_over(memory, source, dest, 4096)
    everything = 4096 * source.token_bytes() // source.num_layers * layers
    assert sent / everything < share


@pytest.mark.parametrize(
    ("shape", "layers", "num_tokens", "gain"),
    [({}, 62, 4096, 2.4), ({}, 62, 8192, 3.5), ({}, 62, 32_768, 5.2), (GPT_OSS, 24, 4096, 1.9)],
)
def test_a_pool_holds_more_tokens(shape, layers, num_tokens, gain):
    """Against a pool of as many bytes whose blocks are all layers deep."""
    depth = layout(16, 1, **shape).num_layers
    pool = layout(16, 1000 * layers, **shape)
    whole = layout(16, 1000 * depth, num_layers=layers, groups=(KVGroup(),))
    assert pool.num_blocks * pool.token_bytes() == whole.num_blocks * whole.token_bytes()
    held = pool.num_blocks // pool.pages_for(num_tokens) * num_tokens
    assert held > gain * (whole.num_blocks // whole.pages_for(num_tokens)) * num_tokens
