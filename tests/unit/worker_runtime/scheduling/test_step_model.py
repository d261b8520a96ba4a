"""The fitted step time against devices whose step time is known."""

from __future__ import annotations

import random
import statistics

import pytest

from worker_runtime.scheduling.step_model import StepModel, StepWork


def device_seconds(shape: StepWork, slower: float = 1.0) -> float:
    """An 8B model in bfloat16 on an H200: weights, arithmetic, KV reads, attention of a chunk."""
    tokens = shape.num_decodes + shape.num_prompt_tokens
    weights = max(3.85e-3, 2.2e-5 * tokens)
    return slower * (weights + 3.2e-8 * shape.context + 1.2e-9 * shape.num_pairs + 2.5e-4)


def a_shape(source: random.Random) -> StepWork:
    num_decodes = source.randint(0, 64)
    chunk, start = source.randint(192, 768), source.randint(0, 4096)
    return StepWork(
        num_decodes=num_decodes,
        context=num_decodes * source.randint(200, 3000),
        num_prompt_tokens=chunk,
        num_pairs=chunk * start + chunk * chunk // 2,
    )


def trained(source: random.Random, steps: int = 200, slower: float = 1.0) -> StepModel:
    model = StepModel()
    for _ in range(steps):
        shape = a_shape(source)
        model.add(shape, device_seconds(shape, slower) * source.uniform(0.98, 1.02))
    return model


@pytest.mark.parametrize("seed", range(5))
def test_it_predicts_within_ten_percent(seed):
    source = random.Random(seed)
    model = trained(source)
    for _ in range(100):
        shape = a_shape(source)
        assert model.predict(shape) == pytest.approx(device_seconds(shape), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_a_chunk_chosen_for_a_time_takes_about_that_time(seed):
    source = random.Random(seed)
    model = trained(source)
    for _ in range(100):
        num_decodes, context, start = source.randint(0, 32), source.randint(0, 60_000), 1000
        chunk = model.prompt_tokens_within(
            0.012, num_decodes=num_decodes, context=context, start=start, max_tokens=2048
        )
        shape = StepWork(
            num_decodes=num_decodes,
            context=context,
            num_prompt_tokens=chunk,
            num_pairs=chunk * start + chunk * chunk // 2,
        )
        assert 192 <= chunk <= 768
        assert device_seconds(shape) == pytest.approx(0.012, rel=0.1)


def test_the_first_steps_are_not_trusted():
    model = StepModel()
    shape = StepWork(num_prompt_tokens=64, num_pairs=2048)
    for _ in range(7):
        model.add(shape, 1.2)
        assert not model.known
    model.add(shape, 0.01)
    assert model.known


def test_steps_without_prompts_and_impossible_times_teach_nothing():
    model = StepModel()
    for _ in range(20):
        model.add(StepWork(num_decodes=8, context=800), 0.005)
        model.add(StepWork(num_prompt_tokens=8), 0.0)
        model.add(StepWork(num_prompt_tokens=8), float("inf"))
    assert not model.known


def test_a_stall_of_the_host_is_not_taken_for_the_device():
    source = random.Random(3)
    model = trained(source)
    shape = a_shape(source)
    before = model.predict(shape)
    model.add(shape, 2.5)
    assert model.predict(shape) == before


def test_it_follows_a_device_that_becomes_slower():
    source = random.Random(4)
    model = trained(source)
    for _ in range(400):
        shape = a_shape(source)
        model.add(shape, device_seconds(shape, slower=1.8))
    shape = a_shape(source)
    assert model.predict(shape) == pytest.approx(device_seconds(shape, slower=1.8), rel=0.1)


def run_steps(
    model: StepModel, source: random.Random, num_steps: int, *, target_s: float, slower: float = 1.0
) -> list[float]:
    """Steps whose chunks the model chooses, as decode plans them: their seconds."""
    seconds = []
    for _ in range(num_steps):
        shape = a_shape(source)
        start = source.randint(0, 4096)
        chunk = 256
        if model.known:
            chunk = model.prompt_tokens_within(
                target_s,
                num_decodes=shape.num_decodes,
                context=shape.context,
                start=start,
                max_tokens=8192,
            )
        chunk = max(64, chunk)
        shape = StepWork(
            num_decodes=shape.num_decodes,
            context=shape.context,
            num_prompt_tokens=chunk,
            num_pairs=chunk * start + chunk * chunk // 2,
        )
        seconds.append(device_seconds(shape, slower) * source.uniform(0.95, 1.05))
        model.add(shape, seconds[-1])
    return seconds


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stalls", [[0.03], [0.1], [0.3], [2.0, 0.5, 1.0], [5.0] * 8], ids=str)
def test_first_steps_that_compile_do_not_keep_chunks_small(stalls, seed):
    source = random.Random(seed)
    model = StepModel()
    for seconds in stalls:
        model.add(StepWork(num_decodes=4, num_prompt_tokens=256, num_pairs=32_000), seconds)
    steps = run_steps(model, source, 200, target_s=0.012)
    assert statistics.mean(steps[-50:]) == pytest.approx(0.012, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slower", [0.15, 3.0, 6.0, 20.0])
def test_chunks_follow_a_device_that_changes_its_speed(slower, seed):
    source = random.Random(seed)
    model = StepModel()
    run_steps(model, source, 200, target_s=0.04)
    target_s = 0.04 * max(1.0, slower)  # more than 64 tokens fit
    steps = run_steps(model, source, 300, target_s=target_s, slower=slower)
    assert statistics.mean(steps[-50:]) == pytest.approx(target_s, rel=0.15)


def test_a_few_equal_steps_do_not_allow_a_huge_one():
    model = StepModel()
    shape = StepWork(num_decodes=4, context=2000, num_prompt_tokens=256, num_pairs=30_000)
    for _ in range(10):
        model.add(shape, device_seconds(shape))
    chunk = model.prompt_tokens_within(
        0.0115, num_decodes=4, context=2000, start=0, max_tokens=2048
    )
    assert 128 <= chunk <= 384


def test_nothing_fits_when_decoding_alone_takes_longer():
    model = trained(random.Random(5))
    chunk = model.prompt_tokens_within(
        0.004, num_decodes=256, context=500_000, start=0, max_tokens=2048
    )
    assert chunk == 0


def test_equal_steps_do_not_wear_the_fit_out():
    """Forgetting without news must not let the covariance grow for ever (blow-up)."""
    model = trained(random.Random(6))
    shape = StepWork(num_decodes=8, context=8000, num_prompt_tokens=300, num_pairs=45_000)
    for _ in range(20_000):
        model.add(shape, device_seconds(shape))
    model.add(shape, 1.5 * device_seconds(shape))
    assert model.predict(shape) < 1.6 * device_seconds(shape)
    other = StepWork(num_decodes=40, context=60_000, num_prompt_tokens=600, num_pairs=180_000)
    assert model.predict(other) == pytest.approx(device_seconds(other), rel=0.5)


#: Rows that steps are rounded up to: milliseconds of them on an H200, products in tiles.
ROUNDED = {256: 7.1, 320: 8.7, 432: 10.3, 512: 10.9, 592: 13.9, 640: 13.7, 768: 15.7}
#: With a size that is hardly larger than one and takes much longer.
UNEVEN = {256: 7.1, 320: 8.7, 432: 10.3, 512: 10.9, 528: 12.6, 640: 13.7, 768: 15.7}


def rounded_seconds(shape: StepWork, sizes: dict[int, float] = ROUNDED) -> float:
    rows = next(size for size in sizes if size >= shape.rows)
    return 1e-3 * sizes[rows] + 3.7e-8 * shape.context + 2.7e-9 * shape.num_pairs


def trained_in_tiles(source: random.Random, sizes: dict[int, float] = ROUNDED) -> StepModel:
    model = StepModel(tuple(sizes))
    for _ in range(600):
        shape = a_shape(source)
        if shape.rows <= 768:
            model.add(shape, rounded_seconds(shape, sizes) * source.uniform(0.98, 1.02))
    return model


@pytest.mark.parametrize("seed", range(3))
def test_each_number_of_rows_takes_its_own_time(seed):
    source = random.Random(seed)
    model = trained_in_tiles(source)
    for shape in filter(lambda shape: shape.rows <= 768, (a_shape(source) for _ in range(100))):
        assert model.predict(shape) == pytest.approx(rounded_seconds(shape), rel=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_a_chunk_fills_the_most_rows_that_fit(seed):
    """592 rows are never worth it where 640 take no longer."""
    source = random.Random(seed)
    model = trained_in_tiles(source)

    def chunk(seconds: float, max_tokens: int = 752) -> int:
        return model.prompt_tokens_within(
            seconds, num_decodes=16, context=0, start=0, max_tokens=max_tokens
        )

    found = [chunk(ms * 1e-3) + 16 for ms in (6.0, 8.0, 9.5, 11.0, 12.5, 14.5, 16.5)]
    assert found == [16, 256, 320, 432, 512, 640, 768]
    assert chunk(0.0145, max_tokens=500) == 500
    assert model.largest_rounded == 768
    assert 768 < chunk(0.030, max_tokens=2048) + 16 <= 1.5 * 768 + 16


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_compute_fewer_tokens_a_second_are_left_out(seed):
    """But for the last tokens of a prompt, which would need a step of their own."""
    model = trained_in_tiles(random.Random(seed), UNEVEN)

    def chunk(seconds: float, max_tokens: int) -> int:
        return model.prompt_tokens_within(
            seconds, num_decodes=16, context=0, start=0, max_tokens=max_tokens
        )

    assert chunk(0.0132, 752) + 16 == 512
    assert chunk(0.0132, 510) == 510
    assert chunk(0.0145, 752) + 16 == 640


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_were_slow_for_a_while_are_tried_again(seed):
    """They are chosen no longer then, and nothing else shows that they are quick again."""
    source = random.Random(seed)
    model = trained_in_tiles(source)

    def chunks(count: int, slowness: float) -> list[int]:
        found = []
        for _ in range(count):
            tokens = model.prompt_tokens_within(
                0.0145, num_decodes=16, context=0, start=0, max_tokens=752
            )
            shape = StepWork(16, 0, min(tokens, source.choice((90, 300, 752))))
            model.add(shape, slowness * rounded_seconds(shape) * source.uniform(0.98, 1.02))
            found.append(tokens + 16)
        return found

    assert set(chunks(50, 1.0)) == {640}
    assert set(chunks(200, 1.3)[-50:]) == {512}
    assert min(chunks(1000, 1.0)[-50:]) >= 592


def test_steps_without_prompt_tokens_have_no_part_of_those_with():
    """Whatever the number of their rows."""
    model = trained_in_tiles(random.Random(0))
    below, at, above = (model.predict(StepWork(num_decodes=n)) for n in (511, 512, 513))
    assert below <= at <= above
