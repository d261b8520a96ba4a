import pytest
import torch

from engine.kernels.triton.reduce import Mailboxes, NormedSum, Reduction, reduce_normed


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
            reduction=Reduction(boxes=boxes, index=index),
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
