import pytest
import torch

from engine.kernels.triton_reduce import Mailboxes, NormedSum, Turn, all_reduce, reduce_normed


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


@pytest.mark.parametrize(("rank", "size", "rows"), [(0, 2, 5), (1, 2, 5), (3, 4, 2), (1, 4, 8)])
def test_the_sum_goes_straight_into_the_norm(device, rank, size, rows):
    """The peers are played by this test: they are ready, and their rows have arrived already."""
    hidden, done = 96, 7
    partials = torch.randn(size, rows, hidden, device=device)
    outs = torch.zeros(size, rows, hidden, device=device)
    signals = torch.zeros(size, size + 1, dtype=torch.int32, device=device)
    boxes = Mailboxes(
        addresses=torch.zeros(size, dtype=torch.int64, device=device),
        done=torch.full((1,), done, dtype=torch.int32, device=device),
        failed=torch.zeros(1, dtype=torch.int32, device=device),
        capacity=1,
        rank=rank,
        size=size,
    )
    share = -(-rows // size)
    mine = slice(min(rank * share, rows), min(rank * share + share, rows))
    owned = mine.stop - mine.start
    h, gain = torch.randn(rows, hidden, device=device), torch.rand(hidden, device=device)
    for index in (0, 3):
        signals[rank, :size] = done + index + 1
        signals[rank, size] = rows - owned
        into = NormedSum(
            turn=Turn(boxes=boxes, index=index),
            partial=partials[rank],
            out=outs[rank],
            partials=torch.tensor([part.data_ptr() for part in partials], device=device),
            outs=torch.tensor([out.data_ptr() for out in outs], device=device),
            signals=torch.tensor([row.data_ptr() for row in signals], device=device),
        )
        want = h[mine] + partials.sum(0)[mine]
        before = h.clone()
        reduce_normed(into, h, gain, 1e-5)
        torch.testing.assert_close(h[mine], want)
        others = [row for row in range(rows) if not mine.start <= row < mine.stop]
        assert torch.equal(h[others], before[others])
        normed = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5) * gain
        for peer in range(size):
            torch.testing.assert_close(outs[peer][mine], normed)
            assert int(signals[peer, rank]) == done + index + 1
        peers = [peer for peer in range(size) if peer != rank]
        assert signals[peers, size].tolist() == [owned * (1 + (index > 0))] * len(peers)
        assert int(signals[rank, size]) == 0
    assert int(boxes.failed) == 0
