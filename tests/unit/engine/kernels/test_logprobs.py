"""Log-probabilities of sampled tokens and of prompts: transformers' log-softmax in float32."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec.structs import replace

from engine.batch import SequenceStep, StepBatch
from engine.kernels.logprobs import ROWS_AT_ONCE, logprob_table
from protocol import codec
from protocol.errors import Internal
from protocol.sampling import LOWEST_LOGPROB, SamplingParams
from tests.support.engine import GREEDY, ThreadedRanks, hf_logits, int32, prompt, whole_runner

#: Of a log-probability, between transformers and the engine, both in float32.
TOLERANCE = 1e-4


def check(entry, row: torch.Tensor, token: int, num_top: int) -> None:
    """`row`: all log-probabilities of the place by transformers."""
    assert entry.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
    assert abs(int((row > row[token]).sum()) + 1 - entry.rank) <= 1
    want = row.topk(num_top)
    assert list(entry.top_logprobs) == pytest.approx(want.values.tolist(), abs=TOLERANCE)
    assert [float(row[i]) for i in entry.top_ids] == pytest.approx(
        want.values.tolist(), abs=TOLERANCE
    )


def scored_chunks(ids, num_top, cut, sampling):
    """The steps of a prompt in chunks of `cut`, every token but the first scored."""
    for start in range(0, len(ids), cut):
        end = min(start + cut, len(ids))
        yield SequenceStep(
            tokens=tuple(ids[start:end]),
            start=start,
            block_tables=(tuple(range(-(-len(ids) // 8))),),
            sampling=sampling if end == len(ids) else None,
            targets=tuple(ids[start + 1 : end + 1]),
            num_top=num_top,
        )


@pytest.mark.parametrize("cut", [1, 7, ROWS_AT_ONCE + 5, 200])
def test_prompt_and_first_token_in_any_chunks(tiny, cut):
    ids = prompt(150)
    logprobs = hf_logits(tiny, ids).log_softmax(dim=-1)
    runner = whole_runner(tiny)
    entries = []
    params = replace(GREEDY, logprobs=5)
    for step in scored_chunks(ids, 3, cut, params):
        result = runner.submit(runner.prepare(StepBatch(sequences=(step,)))).wait()
        entries += result.target_logprobs.get(0, ())
    assert len(entries) == len(ids) - 1
    for position, entry in enumerate(entries):
        check(entry, logprobs[position], ids[position + 1], 3)
    check(result.logprobs[0], logprobs[-1], result.tokens[0], 5)
    assert result.logprobs[0].rank == 1


def test_values_are_the_models_own_before_bias_penalty_and_temperature(tiny):
    ids = prompt(40)
    row = hf_logits(tiny, ids)[-1].log_softmax(dim=-1)
    params = SamplingParams(
        temperature=5.0,
        top_k=2,
        seed=1,
        repetition_penalty=3.0,
        logit_bias=((77, 100.0),),
        logprobs=20,
    )
    step = SequenceStep(
        tokens=tuple(ids),
        start=0,
        block_tables=(tuple(range(5)),),
        sampling=params,
        banned=(5,),
        seen=int32(*sorted(set(ids))),
        counts=int32(*[0] * len(set(ids))),
    )
    plain = replace(step, sampling=replace(GREEDY, logprobs=None), seen=b"", counts=b"")
    runner = whole_runner(tiny)
    result = runner.submit(runner.prepare(StepBatch(sequences=(plain, step)))).wait()
    assert result.tokens[1] == 77
    assert result.logprobs.keys() == {1}
    check(result.logprobs[1], row, 77, 20)


def test_ranks_of_a_tensor_parallel_engine_agree_with_the_whole(tiny):
    steps = [
        *scored_chunks(prompt(70), 2, 100, replace(GREEDY, logprobs=1)),
        SequenceStep(tokens=(4, 5), start=0, block_tables=((20,),), sampling=GREEDY),
    ]
    batch = codec.decode(StepBatch, codec.encode(StepBatch(sequences=tuple(steps))))
    runner = whole_runner(tiny)
    want = runner.submit(runner.prepare(batch)).wait()
    with ThreadedRanks(tiny, 2) as ranks:
        got = ranks.run(batch)
    assert got.tokens == want.tokens
    assert got.logprobs.keys() == want.logprobs.keys() == {0}
    for a, b in zip(got.target_logprobs[0], want.target_logprobs[0], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)
        assert a.top_ids == b.top_ids


def test_everything_is_finite():
    logits = torch.tensor([[0.0, -math.inf, 3.0], [math.nan, 1.0, 2.0], [-3e38, 3e38, 0.0]])
    table = logprob_table(logits, torch.tensor([1, 0, 0]), 20)
    assert table.shape == (3, 2 + 2 * 3)
    assert torch.isfinite(table).all()
    assert table[0, 0] == table[1, 0] == table[2, 0] == LOWEST_LOGPROB


def test_more_targets_than_tokens_are_refused(tiny):
    step = SequenceStep(tokens=(1,), start=0, block_tables=((0,),), sampling=None, targets=(1, 2))
    with pytest.raises(Internal):
        whole_runner(tiny).prepare(StepBatch(sequences=(step,)))
