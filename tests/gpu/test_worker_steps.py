"""A worker's step loop one step ahead, on one GPU and on ranks in processes of their own, against
the local engine on a CPU."""

import pytest
import torch

from protocol.sampling import SamplingParams
from tests.support.apart import apart
from tests.support.engine import GREEDY, config, prompt
from tests.support.families import save_family
from tests.support.local_engine import LocalEngine
from tests.support.step_ranks import lead
from tests.support.tiny import save_tiny_llama


@pytest.mark.parametrize("num_blocks", [6, 64])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2"])
def test_ids_equal_the_local_engine(tmp_path, size, num_blocks, family):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    model = save_tiny_llama(tmp_path) if family == "llama" else save_family(family, tmp_path)
    few, groups = num_blocks == 6, 6 if family == "gemma3" else 1
    seeded = SamplingParams(temperature=1.0, max_tokens=14, seed=5, ignore_eos=True)
    requests = [(prompt(n), GREEDY if n % 2 else seeded) for n in (1, 7, 8, 12, 15, 20)]
    wanted = LocalEngine(config(model)).generate(requests)
    settings = config(model, device="cuda", tp_size=size, num_blocks=num_blocks * groups)
    [(got, num_preemptions, codes)] = apart([(lead, (settings, requests))], timeout_s=150)
    assert got == wanted
    assert (num_preemptions > 0) == few
    assert codes == [0] * (size - 1)
