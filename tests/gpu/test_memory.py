"""Device memory does not grow while an engine runs; what does not fit is refused with figures."""

import pytest
import torch

from engine.batch import StepBatch
from engine.cuda.memory import blocks_that_fit
from engine.errors import ModelRefused
from tests.support.cuda import GREEDY, SEEDED, make_runner, seq, tiny_config


def test_no_growth_over_ten_thousand_steps(device):
    runner = make_runner(device, tiny_config(), dtype="bfloat16")
    runner.start()
    tables = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]

    def round_of_steps(steps):
        prompts = [seq(range(5 + i), 0, tables[i], SEEDED if i else GREEDY) for i in range(3)]
        pending = runner.launch(StepBatch(sequences=tuple(prompts)))
        for step in range(steps):
            sequences = tuple(
                seq([0], 5 + i + step, tables[i], SEEDED if i else GREEDY, previous=i)
                for i in range(3)
            )
            following = runner.launch(StepBatch(sequences=sequences))
            pending.wait()
            pending = following
        pending.wait()

    round_of_steps(40)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    for _ in range(200):
        round_of_steps(50)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)) == before


def test_a_pool_that_does_not_fit_is_refused_with_figures():
    with pytest.raises(ModelRefused, match="no room for KV blocks"):
        blocks_that_fit(
            free_bytes=1 << 30,
            working_bytes=1 << 30,
            block_bytes=1 << 20,
            share=1.0,
            reserve_bytes=0,
        )
