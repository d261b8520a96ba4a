from pathlib import Path

import pytest

from benchmarks import engine, engine_options, families, worker_steps
from benchmarks.shapes import MODELS
from engine.cuda.options import CudaOptions
from engine.model.families import parse_model_config


@pytest.mark.parametrize("benchmark", [engine, worker_steps])
def test_an_engine_under_measurement_is_as_it_is_served(benchmark):
    assert engine_options.options_of(benchmark.parse([])) == CudaOptions()


def test_each_family_is_measured_by_arguments_of_its_own():
    commands = families.commands(Path("out"), "card", "c", list(families.ROWS))
    parsed = {args.model: args for args in map(engine.parse, commands)}
    assert list(parsed) == list(families.ROWS)
    assert parsed.keys() <= MODELS.keys()
    assert parsed["mistral-7b"].out == Path("out/card-mistral-7b.json")
    assert parsed["qwen3-8b-yarn"].context == 131000


def test_rows_of_families_are_held_against_their_limits():
    rows = [
        {"what": "decode batch 1 context 512", "ratio_to_copy": 1.1},
        {"what": "decode batch 1 context 131000", "ratio_to_copy": 9.0},
        {"what": "decode batch 128 context 608", "ratio_to_copy": 1.301},
        {"what": "prefill 1 x 8192", "ratio_to_matrix": 0.79},
        {"what": "long context", "ratio": 1.02},
    ]
    assert list(families.verdicts(rows)) == [
        "decode batch 1 context 512: 1.100 <= 1.10 kept",
        "decode batch 128 context 608: 1.301 <= 1.30 MISSED",
        "prefill 1 x 8192: 0.790 >= 0.80 MISSED",
        "long context: 1.020 <= 1.15 kept",
    ]


def test_the_shapes_of_all_models_are_served():
    for raw in MODELS.values():
        parse_model_config(raw)
