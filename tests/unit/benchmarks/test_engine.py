from pathlib import Path

import pytest

from benchmarks import engine, families, worker_steps
from benchmarks.shapes import MODELS
from engine.cuda.options import CudaOptions
from engine.model.families import parse_model_config


@pytest.mark.parametrize("benchmark", [engine, worker_steps])
def test_an_engine_under_measurement_is_as_it_is_served(benchmark):
    assert engine.options_of(benchmark.parse([])) == CudaOptions()


def test_each_family_is_measured_by_a_command_of_its_own():
    parsed = [engine.parse(command) for command in families.commands(Path("out"), "card", "c")]
    assert [args.model for args in parsed] == list(families.ROWS)
    assert {args.model for args in parsed} <= MODELS.keys()
    assert [args.out.name for args in parsed][:2] == ["card-qwen3-8b.json", "card-mistral-7b.json"]
    assert parsed[-1].context == 131000


def test_the_shapes_of_all_models_are_served():
    for raw in MODELS.values():
        parse_model_config(raw)
