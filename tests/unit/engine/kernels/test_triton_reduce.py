import pytest
import torch

from engine.kernels.triton_reduce import Mailboxes, Turn, all_reduce


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 4)])
def test_sums_what_the_peers_have_sent_and_sends_its_own(device, rank, size):
    """The peers are played by this test: their words are in the mailbox before the kernel looks."""
    capacity, count = 1024, 1300
    boxes = [torch.zeros(2, size, capacity, dtype=torch.int64, device=device) for _ in range(size)]
    group = Mailboxes(
        addresses=torch.tensor([box.data_ptr() for box in boxes], device=device),
        done=torch.zeros(1, dtype=torch.int32, device=device),
        failed=torch.zeros(1, dtype=torch.int32, device=device),
        capacity=capacity,
        rank=rank,
        size=size,
    )
    for epoch in (1, 2, 3):
        parts = [torch.randn(count, device=device).bfloat16() for _ in range(size)]
        words = [part.view(torch.int32).long() & 0xFFFFFFFF for part in parts]
        for peer in set(range(size)) - {rank}:
            boxes[rank][epoch % 2, peer, : count // 2] = words[peer] | (epoch << 32)
        out = torch.full((count,), float("nan"), device=device).bfloat16()
        all_reduce(parts[rank], Turn(boxes=group, index=epoch - 1), out=out)
        want = torch.zeros(count, device=device)
        for part in parts:
            want += part.float()
        # The interpreter cuts bfloat16 off where a GPU rounds it.
        torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=0.0)
        for peer in set(range(size)) - {rank}:
            assert torch.equal(
                boxes[peer][epoch % 2, rank, : count // 2], words[rank] | (epoch << 32)
            )
    assert int(group.failed) == 0


def test_a_silent_peer_is_given_up_and_told(device, monkeypatch):
    monkeypatch.setattr("engine.kernels.triton_reduce.MAX_POLLS", 3)
    boxes = [torch.zeros(2, 2, 256, dtype=torch.int64, device=device) for _ in range(2)]
    group = Mailboxes(
        addresses=torch.tensor([box.data_ptr() for box in boxes], device=device),
        done=torch.zeros(1, dtype=torch.int32, device=device),
        failed=torch.zeros(1, dtype=torch.int32, device=device),
        capacity=256,
        rank=0,
        size=2,
    )
    part = torch.ones(64, dtype=torch.bfloat16, device=device)
    all_reduce(part, Turn(boxes=group, index=0), out=part.clone())
    assert int(group.failed) == 1
