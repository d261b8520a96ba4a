"""The local engine: transformers' ids, whatever the chunking, the batch and the room."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.kernels.sampling import mask_bytes
from engine.kv import sizing
from protocol.errors import ContextTooLong, InvalidRequest
from protocol.sampling import SamplingParams
from tests.support.engine import GREEDY, config, prompt
from tests.support.local_engine import LocalEngine
from tests.support.tiny import Oracle, save_tiny_llama

LENGTHS = [1, 7, 8, 9, 31, 32, 33, 103]
SEEDED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=42)


@pytest.fixture(scope="module")
def oracle(tiny):
    return Oracle(tiny)


@pytest.fixture(scope="module")
def expected(oracle):
    return [oracle.greedy(prompt(length), 8) for length in LENGTHS]


def generate(tiny, requests, **changes):
    engine = LocalEngine(config(tiny, **changes))
    return engine.generate(requests), engine


@pytest.mark.parametrize("budget", [5, 32, 512])
def test_greedy_ids_equal_transformers_for_every_chunking(tiny, expected, budget):
    requests = [(prompt(length), GREEDY) for length in LENGTHS]
    got, engine = generate(tiny, requests, max_step_tokens=budget)
    assert got == expected
    assert engine.preemptions == 0


def test_one_at_a_time_equals_all_at_once(tiny, expected):
    requests = [(prompt(length), GREEDY) for length in LENGTHS]
    got, _ = generate(tiny, requests, max_running=1)
    assert got == expected


@pytest.mark.parametrize("num_blocks", [14, 17, 25])
def test_preemption_changes_nothing(tiny, oracle, num_blocks):
    requests = [
        (prompt(length), replace(GREEDY, max_tokens=40)) for length in (1, 9, 31, 40, 8, 17, 60)
    ]
    seeded = [(prompt(20, seed=s), replace(SEEDED, max_tokens=40, seed=s)) for s in range(4)]
    mixed = [*requests, *seeded]
    roomy, free = generate(tiny, mixed, num_blocks=200)
    tight, engine = generate(tiny, mixed, num_blocks=num_blocks, max_step_tokens=16)
    assert free.preemptions == 0
    assert engine.preemptions > 0
    assert tight == roomy
    assert roomy[0] == oracle.greedy(prompt(1), 40)


def test_a_seeded_request_gives_the_same_ids_alone_in_a_batch_and_in_any_slot(tiny):
    request = (prompt(19), SEEDED)
    alone, _ = generate(tiny, [request])
    others = [
        (prompt(5, seed=s), replace(SEEDED, seed=s, temperature=t, top_k=k, top_p=p))
        for s, (t, k, p) in enumerate([(0.0, 0, 1.0), (2.0, 5, 1.0), (0.7, 0, 0.9)])
    ]
    for position in range(4):
        batch = [*others[:position], request, *others[position:], request, request]
        got, _ = generate(tiny, batch, max_step_tokens=24)
        assert [got[position], got[-1], got[-2]] == alone * 3


def test_different_seeds_give_different_ids(tiny):
    got, _ = generate(tiny, [(prompt(19), replace(SEEDED, seed=s)) for s in range(6)])
    assert len({tuple(ids) for ids in got}) == 6


def test_tiny_temperatures_and_zero_are_alike(tiny, expected):
    params = [replace(GREEDY, temperature=t) for t in (0.0, 1e-6, 9e-5)]
    got, _ = generate(tiny, [(prompt(33), p) for p in params])
    assert got == [expected[LENGTHS.index(33)]] * 3


def test_stop_tokens_end_a_sequence_but_not_before_min_tokens(tiny, expected):
    free_run = expected[LENGTHS.index(32)]
    stop = free_run[3]
    first = free_run.index(stop) + 1
    params = replace(GREEDY, stop_token_ids=(stop,))
    ended, held = generate(
        tiny, [(prompt(32), params), (prompt(32), replace(params, min_tokens=6))]
    )[0]
    assert ended == free_run[:first]
    assert stop not in held[:6]
    assert len(held) >= 6


def test_end_of_sequence_ends_unless_ignored(tiny, expected):
    free_run = expected[LENGTHS.index(32)]
    params = replace(GREEDY, ignore_eos=False, eos_token_ids=(free_run[0], 127))
    got, _ = generate(tiny, [(prompt(32), params), (prompt(32), replace(params, ignore_eos=True))])
    assert got == [free_run[:1], free_run]


def test_a_request_that_fills_the_context_exactly_runs_and_one_more_token_is_refused(tiny):
    fits = replace(GREEDY, max_tokens=4)
    got, _ = generate(tiny, [(prompt(60), fits)], max_model_len=64)
    assert len(got[0]) == 4
    with pytest.raises(ContextTooLong) as caught:
        generate(tiny, [(prompt(61), fits)], max_model_len=64)
    assert caught.value.param == "max_tokens"


def test_a_request_that_fills_the_pool_exactly_runs_and_one_more_token_is_refused(tiny):
    fits = (prompt(24), replace(GREEDY, max_tokens=8))
    got, _ = generate(tiny, [fits, fits], num_blocks=4, block_size=8)
    assert [len(ids) for ids in got] == [8, 8]
    with pytest.raises(ContextTooLong):
        generate(tiny, [(prompt(25), replace(GREEDY, max_tokens=8))], num_blocks=4)


@pytest.mark.parametrize(
    ("ids", "params", "field"),
    [
        ([], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        ([128], GREEDY, "prompt"),
        ([1], replace(GREEDY, temperature=-1.0), "temperature"),
        ([1], replace(GREEDY, stop_token_ids=(128,)), "stop_token_ids"),
    ],
)
def test_a_bad_request_is_refused_by_field_before_anything_runs(tiny, ids, params, field):
    engine = LocalEngine(config(tiny))
    with pytest.raises(InvalidRequest) as caught:
        engine.generate([([1, 2], GREEDY), (ids, params)])
    assert caught.value.param == field
    assert engine.steps == 0


def test_two_engines_in_one_process_do_not_disturb_each_other(tiny, expected, tmp_path):
    other_path = save_tiny_llama(tmp_path, seed=5, num_key_value_heads=4, vocab_size=77)
    first, second = LocalEngine(config(tiny)), LocalEngine(config(other_path, block_size=4))
    ids = prompt(33, vocab=70)
    alone = second.generate([(ids, GREEDY)])
    assert first.generate([(prompt(33), GREEDY)]) == [expected[LENGTHS.index(33)]]
    assert second.generate([(ids, GREEDY)]) == alone == [Oracle(other_path).greedy(ids, 8)]


def test_warmup_runs_real_steps_at_any_block_size(tiny):
    for block_size in (1, 2, 16):
        engine = LocalEngine(config(tiny, block_size=block_size))
        engine.executor.warmup()
        assert engine.executor.pool.data[:, 0].any()
        assert not engine.executor.pool.data[:, 1:].any()


def test_the_pool_is_sized_by_memory_when_asked(tiny):
    executor = LocalEngine(config(tiny, num_blocks=None, kv_memory_bytes=1 << 20)).executor
    layers, kv_heads, dim, block = 2, 2, 16, 8
    assert executor.layout.num_blocks == (1 << 20) // (layers * 2 * kv_heads * dim * block * 4)
    with pytest.raises(InvalidRequest) as caught:
        LocalEngine(config(tiny, num_blocks=None, kv_memory_bytes=100))
    assert caught.value.param == "kv_memory_bytes"


def test_without_any_setting_the_pool_takes_a_share_of_the_free_memory(tiny, monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda: 8 << 20)
    executor = LocalEngine(config(tiny, num_blocks=None)).executor
    assert executor.layout.num_blocks == 256
    monkeypatch.undo()
    assert sizing.available_memory() > 1 << 20


def test_fingerprints_tell_models_apart(tiny, tmp_path):
    mine = LocalEngine(config(tiny)).executor.fingerprint
    assert mine.differing_field(LocalEngine(config(tiny)).executor.fingerprint) is None
    other = LocalEngine(config(save_tiny_llama(tmp_path, seed=9))).executor.fingerprint
    assert mine.differing_field(other) == "weights"
    half = LocalEngine(config(tiny, dtype="bfloat16")).executor.fingerprint
    assert mine.differing_field(half) == "dtype"


@pytest.mark.parametrize("field", ["device", "tp_size"])
def test_what_this_build_cannot_run_is_refused(tiny, field):
    with pytest.raises(InvalidRequest) as caught:
        LocalEngine(config(tiny, **{field: {"device": "abacus", "tp_size": 2}[field]}))
    assert caught.value.param == field


def test_masks_follow_the_output_in_any_batch_and_after_preemption(tiny):
    """Each output token may only be one of three ids that depend on those before it."""
    roomy, tight = (LocalEngine(config(tiny, num_blocks=n)) for n in (200, 13))
    vocab = roomy.executor.vocab_size

    def mask_of(output):
        tokens = {(7 * len(output) + 3 * i + sum(output)) % vocab for i in range(3)}
        return sum(1 << token for token in tokens).to_bytes(mask_bytes(vocab), "little")

    requests = [(prompt(n), replace(p, max_tokens=20)) for n in (5, 40) for p in (GREEDY, SEEDED)]
    masks = [mask_of, mask_of, None, mask_of]
    together = roomy.generate(requests, masks)
    assert tight.generate(requests, masks) == together
    assert tight.preemptions > 0
    for request, mask, output in zip(requests, masks, together, strict=True):
        assert roomy.generate([request], [mask]) == [output]
        for i in range(len(output) if mask else 0):
            allowed = int.from_bytes(mask_of(output[:i]), "little")
            assert allowed >> output[i] & 1
