import pytest
import torch

from engine.kernels import sampling as reference
from engine.kernels.sampling import TokenMasks, mask_on_device
from engine.kernels.triton.sampling import RowSampling, SamplingScratch, sample
from protocol.sampling import SamplingParams


def device_sample(logits, params, positions, device):
    keys = [reference.noise_key(p.seed, at) for p, at in zip(params, positions, strict=True)]

    def column(values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype, device=device)

    rows = RowSampling(
        temperature=column([0.0 if p.greedy else p.temperature for p in params]),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params]),
        min_p=column([p.min_p for p in params]),
        keys=column(keys, torch.int32),
        filtered=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
    )
    out = torch.full((len(params),), -1, dtype=torch.int32, device=device)
    scratch = SamplingScratch(len(params), logits.shape[1], device)
    for _ in range(2):  # twice: the counters must be left at zero
        sample(logits, rows, scratch, out=out)
    return out.tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 1e-46},  # 0 in float32
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 300, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 2.0, "top_k": 3, "top_p": 0.4},
    ],
)
@pytest.mark.parametrize("vocab_size", [97, 5000])
def test_same_ids_as_the_reference(device, params, vocab_size):
    rows = 6
    logits = torch.randn(rows, vocab_size, device=device) * 3
    chosen = [SamplingParams(seed=17 * row + 5, **params) for row in range(rows)]
    positions = [3 + row * 1001 for row in range(rows)]
    inputs = reference.SamplingInputs.build(chosen, positions, [()] * rows)
    want = reference.sample(logits.cpu().clone(), inputs).tolist()
    assert device_sample(logits, chosen, positions, device) == want


def test_rows_are_independent_and_ties_go_to_the_lowest_id(device):
    logits = torch.randn(3, 9000, device=device)
    logits[0, [70, 5001, 8999]] = 50.0
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=40, seed=3),
        SamplingParams(temperature=1.0, seed=4),
    ]
    together = device_sample(logits, params, [9, 10, 11], device)
    alone = [device_sample(logits[i : i + 1], [params[i]], [9 + i], device)[0] for i in range(3)]
    assert together == alone
    assert together[0] == 70


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}]
)
def test_rows_that_are_not_finite_give_no_id_and_no_other_row_notices(device, params):
    logits = torch.randn(4, 5000, device=device)
    chosen = [SamplingParams(seed=row, **params) for row in range(4)]
    sound = device_sample(logits, chosen, [1, 2, 3, 4], device)
    logits[0, 17 if sound[0] != 17 else 18] = -torch.inf  # as masks leave it
    logits[1] = torch.nan
    logits[2, 4999] = torch.nan
    logits[3, 7] = torch.inf
    assert device_sample(logits, chosen, [1, 2, 3, 4], device) == [sound[0], -1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first_id", "width"), [(0, 4100), (4000, 100)])
def test_masks_leave_the_same_logits_as_the_reference(device, dtype, first_id, width):
    words = torch.randint(-(2**31), 2**31, (2, 129), dtype=torch.int64).int()
    masks = TokenMasks(rows=torch.tensor([3, 0]), words=words)
    want = torch.randn(4, width).to(dtype)
    got = want.to(device, copy=True)
    masks.apply(want, first_id=first_id)
    mask_on_device(got, masks.rows.to(device), words.to(device), first_id)
    assert torch.equal(got.cpu(), want)
    assert want[[1, 2]].isfinite().all()
    assert want.isinf().any()
