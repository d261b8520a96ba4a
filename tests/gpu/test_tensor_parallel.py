"""Tensor-parallel ranks on several GPUs against the plain model of one rank on the CPU."""

import subprocess
import sys

import pytest
import torch
from torch.distributed import TCPStore

from tests.support.cuda import Reference, make_runner, mixed_script, tiny_config

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def run_rank(rank: int, size: int, port: int) -> list[tuple[int | None, ...]]:
    """One rank's whole life; also the entry point of the follower processes."""
    from engine.cuda.group import DeviceGroup

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    runner = make_runner(device, tiny_config(**HEADS), rank, size)
    store = TCPStore("127.0.0.1", port, size, is_master=False)
    runner.start(DeviceGroup(store, rank, size, device, name="test"))
    results = [runner.run(batch).tokens for batch in mixed_script()]
    torch.cuda.synchronize()
    runner.close()
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_tokens_of_one(size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    code = "import sys; from tests.gpu.test_tensor_parallel import run_rank; "
    code += "run_rank(*map(int, sys.argv[1:]))"
    followers = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(size), str(store.port)])
        for rank in range(1, size)
    ]
    try:
        got = run_rank(0, size, store.port)
        assert [process.wait(60) for process in followers] == [0] * (size - 1)
    finally:
        for process in followers:
            process.kill()
    config = tiny_config(**HEADS)
    reference = Reference(config)
    reference.open(make_runner(torch.device("cuda", 0), config).layout)
    assert got == [reference.run(batch) for batch in mixed_script()]
