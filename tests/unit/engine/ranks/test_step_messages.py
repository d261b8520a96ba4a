"""Steps told as differences are the steps, whatever sequences come, grow, go and return."""

from __future__ import annotations

import random

import pytest

from engine.batch import SequenceStep, StepBatch
from engine.ranks.step_messages import StepReader, StepWriter
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def batch(tables: list[tuple[tuple[int, ...], ...]]) -> StepBatch:
    return StepBatch(
        sequences=tuple(
            SequenceStep(tokens=(number,), start=3, block_tables=table, sampling=GREEDY)
            for number, table in enumerate(tables)
        )
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_reader_gets_every_batch(seed: int, groups: int) -> None:
    rng, writer, readers = random.Random(seed), StepWriter(), [StepReader(), StepReader()]
    tables: list[list[list[int]]] = []
    kept: dict[int, tuple[tuple[int, ...], ...]] = {}  # as a sequence keeps those of its last step
    for _ in range(200):
        for number, own in enumerate(tables):
            grown = [ids.append(rng.randrange(1000)) for ids in own if rng.random() < 0.2]
            if rng.random() < 0.05:
                del own[-1][0]  # a window moves
                own[-1] = own[-1] or [rng.randrange(1000)]
                grown = [None]
            if grown:
                kept.pop(number, None)
        if len(tables) < 8 or rng.random() < 0.1:
            first = rng.randrange(4)  # some begin with the same blocks
            tables.append([[first, *rng.sample(range(1000), 3)] for _ in range(groups)])
        for number, own in enumerate(tables):
            kept.setdefault(number, tuple(tuple(ids) for ids in own))
        running = sorted(rng.sample(sorted(kept), rng.randint(1, min(6, len(kept)))))
        sent = batch([kept[number] for number in running])
        message = writer.encode(sent)
        assert [reader.decode(message) for reader in readers] == [sent, sent]


def test_long_tables_are_told_once() -> None:
    writer, reader = StepWriter(), StepReader()
    tables = [(tuple(range(n * 2000, n * 2000 + 2000)),) for n in range(64)]
    first = reader.decode(writer.encode(batch(tables)))
    tables[5] = ((*tables[5][0], 999_999),)
    message = writer.encode(batch(tables))
    assert len(message) < 10_000
    second = reader.decode(message)
    assert second == batch(tables)
    pairs = zip(first.sequences, second.sequences, strict=True)
    same = [a.block_tables[0] is b.block_tables[0] for a, b in pairs]
    assert same == [number != 5 for number in range(64)]
