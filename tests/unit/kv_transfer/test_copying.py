"""The paged copy against indexing; in triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from kv_transfer.cuda.copying import PoolShape, copy_rows, dense_rows, pool_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, TOKENS = 3, 4


def make_pool(num_blocks, num_heads, dim, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, num_blocks, 2, num_heads, TOKENS, dim)
    pool = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    page = TOKENS * dim * dtype.itemsize
    return pool, PoolShape(num_layers=LAYERS, num_blocks=num_blocks, num_heads=num_heads, page=page)


def ids(blocks):
    return torch.tensor(blocks, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ctas", [1, 3, 1000])
@pytest.mark.parametrize(
    ("first_layer", "num_layers", "head", "peer_head", "num_heads", "peer_heads"),
    [(0, 3, 0, 0, 4, 4), (1, 2, 1, 0, 3, 3), (2, 1, 3, 1, 1, 2), (0, 3, 0, 2, 2, 4)],
)
def test_between_pools(
    dtype, ctas, first_layer, num_layers, head, peer_head, num_heads, peer_heads
):
    source, shape = make_pool(7, 4, 24, dtype, seed=1)
    target, peer_shape = make_pool(9, peer_heads, 24, dtype, seed=2)
    blocks, peer_blocks = [5, 1, 3, 6], [0, 8, 4, 2]
    expected = target.clone()
    layers = slice(first_layer, first_layer + num_layers)
    picked = source[layers][:, blocks, :, head : head + num_heads]
    expected[layers, :, :, peer_head : peer_head + num_heads][:, peer_blocks] = picked
    copy_rows(
        pool_rows(
            source.data_ptr(),
            shape,
            first_layer=first_layer,
            first_head=head,
            pages=ids(blocks),
        ),
        pool_rows(
            target.data_ptr(),
            peer_shape,
            first_layer=first_layer,
            first_head=peer_head,
            pages=ids(peer_blocks),
        ),
        num_layers=num_layers,
        num_blocks=len(blocks),
        run=num_heads * shape.page,
        ctas=ctas,
    )
    assert torch.equal(target, expected)


def test_through_a_dense_buffer():
    source, shape = make_pool(7, 4, 16, torch.bfloat16, seed=1)
    target, _ = make_pool(7, 4, 16, torch.bfloat16, seed=2)
    expected = target.clone()
    blocks, peer_blocks = [6, 0, 2], [1, 5, 3]
    buffer = torch.zeros((2, 3, 2, 2, TOKENS, 16), dtype=torch.bfloat16, device=DEVICE)
    dense = dense_rows(buffer.data_ptr(), num_blocks=3, num_heads=2, page=shape.page)
    size = {"num_layers": 2, "num_blocks": 3, "run": 2 * shape.page, "ctas": 4}
    place = {"first_layer": 1, "first_head": 1}
    copy_rows(pool_rows(source.data_ptr(), shape, pages=ids(blocks), **place), dense, **size)
    assert torch.equal(buffer, source[1:][:, blocks, :, 1:3])
    copy_rows(dense, pool_rows(target.data_ptr(), shape, pages=ids(peer_blocks), **place), **size)
    expected[1:, :, :, 1:3][:, peer_blocks] = buffer
    assert torch.equal(target, expected)


def test_what_is_not_aligned_is_refused():
    source, shape = make_pool(2, 1, 16, torch.float32, seed=1)
    rows = pool_rows(source.data_ptr(), shape, first_layer=0, first_head=0, pages=ids([0]))
    with pytest.raises(ValueError, match="not aligned"):
        copy_rows(rows, rows, num_layers=1, num_blocks=1, run=shape.page + 4, ctas=1)
