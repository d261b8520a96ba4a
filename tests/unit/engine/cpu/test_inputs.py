"""How a batch is laid out in rows, and what is refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.batch import StepBatch
from engine.cpu.inputs import StepLimits, prepare_step
from protocol.errors import Internal
from tests.support.engine import chunk


def prepare(*steps, **limits):
    settings = {"block_size": 4, "num_blocks": 10, "vocab_size": 50, "max_model_len": 32} | limits
    return prepare_step(StepBatch(sequences=steps), StepLimits(**settings))


def test_decodes_come_first_longest_context_first_and_results_map_back():
    step = prepare(
        chunk(range(5), 0, [0, 1], None),
        chunk([7], 2, [5]),
        chunk(range(3), 4, [2, 3]),
        chunk([9], 9, [6, 7, 8]),
    )
    inputs = step.inputs
    assert inputs.queries == (1, 1, 3, 5)
    assert inputs.contexts == (10, 3, 7, 5)
    assert inputs.num_decodes == 2
    assert inputs.token_ids.tolist() == [9, 7, 0, 1, 2, 0, 1, 2, 3, 4]
    assert inputs.positions.tolist() == [9, 2, 4, 5, 6, 0, 1, 2, 3, 4]
    assert inputs.slots.tolist() == [33, 22, 12, 13, 14, 0, 1, 2, 3, 4]
    assert inputs.sample_rows.tolist() == [0, 1, 4]
    assert step.sampled == (3, 1, 2)
    assert not inputs.samples_all


def test_only_the_blocks_in_use_are_kept():
    assert prepare(chunk([1], 3, [4, 5, 6])).inputs.block_ids == ((4,),)


def test_a_step_that_samples_nothing_has_no_rows():
    inputs = prepare(chunk(range(4), 0, [0], None)).inputs
    assert inputs.sample_rows.shape == (0,)


@pytest.mark.parametrize(
    "wrong",
    [
        chunk([], 0, [0]),
        chunk([1], -1, [0]),
        chunk([50], 0, [0]),
        chunk([-1], 0, [0]),
        chunk([1], 4, [0]),
        chunk([1], 0, [10]),
        chunk([1], 0, [-1]),
        chunk([1], 32, list(range(9))),
        replace(chunk([1], 0, [0]), previous=0),
        replace(chunk([1], 0, [0]), allowed=bytes(8)),
        replace(chunk([1], 0, [0]), allowed=b"\1" * 4),
    ],
)
def test_an_unsound_step_is_refused(wrong):
    with pytest.raises(Internal):
        prepare(chunk([1], 0, [1]), wrong)
