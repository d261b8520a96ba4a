"""A rank takes memory of its own GPU only, though it sees those of all ranks."""

import threading

import pytest
import torch

from engine.executor import Executor
from tests.support.apart import apart
from tests.support.cuda import make_runner, tiny_config


def run_on_the_second():
    """Steps in a thread of their own; whether there is a context on the first GPU afterwards."""
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    runner = make_runner(device, tiny_config(), dtype="bfloat16")
    runner.start()
    executor = Executor(runner, fingerprint=None)

    def steps():
        executor.enter_thread()
        executor.warmup()

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    return torch._C._cuda_hasPrimaryContext(0)


def test_steps_on_one_gpu_take_no_context_on_another():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    assert apart([(run_on_the_second, ())], timeout_s=100) == [False]
