"""Which launches go through triton, and what the others hand to the driver."""

from types import SimpleNamespace

import pytest
import torch

from engine.kernels.triton import launch


class Variant:
    function, packed_metadata = "function", "packed"

    def __init__(self, runs):
        self.runs = runs

    def run(self, *args):
        self.runs.append(args)


class Kernel:
    """Takes part in a launch as a triton.jit function does."""

    arg_names = ("x", "n", "BLOCK", "PDL")

    def __init__(self):
        self.looked_at = []
        self.runs = []

    def __getitem__(self, grid):
        def call(*args, **named):
            self.looked_at.append((grid, args, named))
            return Variant(self.runs)

        return call


@pytest.fixture
def kernel(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 77)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    return Kernel()


def test_the_first_launch_of_a_kind_goes_through_triton_and_the_others_past_it(kernel):
    repeated = launch.Repeated(kernel)
    x, y = torch.zeros(64), torch.zeros(64)
    repeated[4,](x, 8, PDL=True, BLOCK=16, num_warps=2)
    repeated[5, 6](y, 8, PDL=True, BLOCK=16, num_warps=2)
    assert kernel.looked_at == [((4,), (x, 8), {"PDL": True, "BLOCK": 16, "num_warps": 2})]
    shape = (5, 6, 1)
    assert kernel.runs == [
        (*shape, 77, "function", "packed", None, None, None, y.data_ptr(), 8, 16, True)
    ]


@pytest.mark.parametrize(
    ("tensor", "number", "named"),
    [
        (torch.zeros(64)[1:], 8, {}),  # not aligned
        (torch.zeros(64, dtype=torch.bfloat16), 8, {}),
        (torch.zeros(64), 9, {}),
        (torch.zeros(64), 8, {"BLOCK": 32}),
        (torch.zeros(64), 8, {"num_warps": 4}),
    ],
)
def test_a_launch_of_another_kind_goes_through_triton(kernel, tensor, number, named):
    repeated = launch.Repeated(kernel)
    constants = {"BLOCK": 16, "PDL": False, "num_warps": 2}
    repeated[1,](torch.zeros(64), 8, **constants)
    repeated[1,](tensor, number, **(constants | named))
    assert len(kernel.looked_at) == 2
    assert kernel.runs == []


def test_the_interpreters_kernels_are_called_as_they_are(kernel, monkeypatch):
    monkeypatch.setattr(launch, "JITFunction", int)
    repeated = launch.Repeated(kernel)
    for _ in range(2):
        repeated[1,](torch.zeros(4), 8, BLOCK=16)
    assert len(kernel.looked_at) == 2
