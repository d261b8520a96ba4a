import pytest

from benchmarks import engine, worker_steps
from engine.cuda.options import CudaOptions


@pytest.mark.parametrize("benchmark", [engine, worker_steps])
def test_an_engine_under_measurement_is_as_it_is_served(benchmark):
    assert engine.options_of(benchmark.parse([])) == CudaOptions()
