"""Biases and penalties: the formulas written out, transformers' processors and generate."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.batch import SequenceStep, TokenHistory
from engine.kernels.sampling import Penalties, SamplingInputs, sample
from protocol.sampling import SamplingParams
from tests.support.engine import config, int32, prompt
from tests.support.local_engine import LocalEngine

VOCAB = 60
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=40)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.floats(-100, 100, width=16), max_size=4
    ).map(lambda bias: tuple(bias.items())),
)


def step_of(params, prompt_ids, output_ids) -> SequenceStep:
    history = TokenHistory(prompt_ids, output_ids, params)
    seen, counts = (history.seen(), history.counts()) if params.penalised else (b"", b"")
    return SequenceStep(
        tokens=(0,), start=0, block_tables=((0,),), sampling=params, seen=seen, counts=counts
    )


def changed(logits, steps) -> torch.Tensor:
    penalties = Penalties.build(steps)
    logits = logits.clone()
    if penalties is not None:
        penalties.apply(logits)
    return logits


def by_hand(logits, params, prompt_ids, output_ids) -> list[float]:
    """One row, number by number: bias, repetition, frequency, presence."""
    bias, counts = dict(params.logit_bias), Counter(output_ids)
    out = []
    for token, value in enumerate(logits.tolist()):
        value += bias.get(token, 0.0)
        if token in counts or token in prompt_ids:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (counts[token] > 0)
        out.append(value)
    return out


@given(st.lists(st.tuples(PARAMS, IDS, IDS), min_size=1, max_size=5), st.integers(0, 99))
def test_each_row_follows_the_formulas_and_nothing_else(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    together = changed(logits, [step_of(*row) for row in rows])
    for row, (params, before, after) in enumerate(rows):
        want = torch.tensor(by_hand(logits[row], params, before, after))
        torch.testing.assert_close(together[row], want, rtol=1e-5, atol=1e-4)
        alone = changed(logits[row : row + 1], [step_of(params, before, after)])
        assert torch.equal(alone[0], together[row])


@given(IDS.filter(bool), st.sampled_from([0.5, 1.7]), st.integers(0, VOCAB - 1))
def test_same_as_the_processors_of_transformers(ids, repetition, biased):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(len(ids)))
    params = SamplingParams(repetition_penalty=repetition, logit_bias=((biased, -3.5),))
    given_ids = torch.tensor([ids])
    want = SequenceBiasLogitsProcessor([[[biased], -3.5]])(given_ids, logits.clone())
    want = RepetitionPenaltyLogitsProcessor(repetition)(given_ids, want)
    half = len(ids) // 2
    assert torch.equal(changed(logits, [step_of(params, ids[:half], ids[half:])]), want)


def test_a_banned_token_stays_banned_whatever_its_bias_and_penalties():
    logits = torch.zeros(1, VOCAB).bfloat16()
    params = SamplingParams(
        temperature=0.0, logit_bias=((5, 100.0), (6, 99.0)), repetition_penalty=0.5
    )
    steps = [step_of(params, [5, 6], [])]
    inputs = SamplingInputs.build([params], [3], [(5,)], Penalties.build(steps))
    assert sample(logits, inputs).tolist() == [6]


def test_without_penalties_there_is_nothing_to_do():
    assert Penalties.build([step_of(SamplingParams(), [1, 2], [3])]) is None
    params = SamplingParams(frequency_penalty=1.0)
    assert Penalties.build([step_of(params, [1, 2], [])]) is None, "the prompt does not count"


def test_counts_of_a_resumed_sequence_are_those_of_an_unbroken_one():
    params = SamplingParams(repetition_penalty=1.2)
    unbroken = TokenHistory([4, 4, 9], [], params)
    for token in (9, 7, 9):
        unbroken.add(token)
    resumed = TokenHistory([4, 4, 9], [9, 7, 9], params)
    assert (resumed.seen(), resumed.counts()) == (int32(4, 9, 7), int32(0, 2, 1))
    assert (unbroken.seen(), unbroken.counts()) == (resumed.seen(), resumed.counts())


class _OpenAIPenalties(LogitsProcessor):
    """transformers has no such processor: the formula of OpenAI's API reference."""

    def __init__(self, start: int, frequency: float, presence: float) -> None:
        self._start, self._frequency, self._presence = start, frequency, presence

    def __call__(self, input_ids, scores):
        counts = torch.bincount(input_ids[0, self._start :], minlength=scores.shape[1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


@pytest.fixture(scope="module")
def expected(tiny):
    """Greedy ids by transformers' own generate, with penalties, for four prompts."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)

    def run(ids, params):
        extra = _OpenAIPenalties(len(ids), params.frequency_penalty, params.presence_penalty)
        biases = [[[token], bias] for token, bias in params.logit_bias]
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=params.max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            repetition_penalty=params.repetition_penalty,
            sequence_bias=biases or None,
            logits_processor=LogitsProcessorList([extra]),
        )
        return out[0, len(ids) :].tolist()

    return [(ids, params, run(ids, params)) for ids, params in requests()]


def requests() -> list[tuple[list[int], SamplingParams]]:
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return [
        (prompt(30), replace(plain, repetition_penalty=1.4)),
        (prompt(9), replace(plain, frequency_penalty=1.1, presence_penalty=0.6)),
        (prompt(17), replace(plain, presence_penalty=2.0, logit_bias=((3, 5.0), (90, -100.0)))),
        (prompt(21), plain),
    ]


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 14, "max_step_tokens": 16}])
def test_greedy_ids_equal_transformers_generate(tiny, expected, changes):
    engine = LocalEngine(config(tiny, **changes))
    got = engine.generate([(ids, params) for ids, params, _ in expected])
    assert got == [ids for _, _, ids in expected]
    assert (engine.preemptions > 0) == bool(changes)
    alone = engine.generate([expected[0][:2]])
    assert alone == [expected[0][2]]
