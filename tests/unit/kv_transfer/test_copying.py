"""The paged copy against indexing; where there is no GPU, its plain form, compiled for the CPU."""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kv_transfer.cuda import copying
from kv_transfer.cuda.copying import Extent, PoolShape, copy_rows, dense_rows, pool_rows
from protocol.kv_layout import Cells

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, TOKENS = 3, 4
TILE = 64
ON_CPU = """
#define __device__
#define __global__
#define __grid_constant__
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } blockIdx, gridDim, threadIdx, blockDim;
#include "copy_rows.cu"
extern "C" void launch(const Rows* source, const Rows* target, const Size* size, unsigned blocks) {
    for (gridDim = {blocks}, blockDim = {3}, blockIdx = {0}; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx = {0}; threadIdx.x < blockDim.x; threadIdx.x++)
            copy_rows(*source, *target, *size);
}
"""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The kernel as a function of this process."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("copy")
    source, library = folder / "copy.cpp", folder / "copy.so"
    source.write_text(ON_CPU)
    include = Path(copying.__file__).parent
    command = [compiler, "-shared", "-fPIC", f"-I{include}", f"-DTILE={TILE}", "-DSLOTS=2"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    run = ctypes.CDLL(str(library)).launch

    def launch(blocks, stream, *args):
        run(*(ctypes.byref(arg) for arg in args), blocks)

    return SimpleNamespace(launch=launch)


@pytest.fixture(autouse=True)
def kernel(request, monkeypatch):
    """On a GPU the real one, with tiles of its own size."""
    if DEVICE.type == "cuda":
        return
    plain = request.getfixturevalue("on_cpu")
    stream = SimpleNamespace(device=DEVICE, cuda_stream=0)
    monkeypatch.setattr(copying, "_TILE", TILE)
    monkeypatch.setattr(copying, "load_copies", lambda _: plain)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


def make_pool(num_blocks, num_heads, dim, dtype, seed, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, num_blocks, 2, num_heads, tokens, dim)
    pool = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    page = tokens * dim * dtype.itemsize
    return pool, PoolShape(num_blocks=num_blocks, num_heads=num_heads, page=page)


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
            cell_bytes=shape.page,
            pages=ids(blocks),
        ),
        pool_rows(
            target.data_ptr(),
            peer_shape,
            first_layer=first_layer,
            first_head=peer_head,
            cell_bytes=shape.page,
            pages=ids(peer_blocks),
        ),
        Extent(
            num_layers=num_layers,
            num_cells=len(blocks),
            num_heads=num_heads,
            cell_bytes=shape.page,
        ),
        ctas=ctas,
    )
    assert torch.equal(target, expected)


def test_through_a_dense_buffer():
    source, shape = make_pool(7, 4, 16, torch.bfloat16, seed=1)
    target, _ = make_pool(7, 4, 16, torch.bfloat16, seed=2)
    expected = target.clone()
    blocks, peer_blocks = [6, 0, 2], [1, 5, 3]
    buffer = torch.zeros((2, 3, 2, 2, TOKENS, 16), dtype=torch.bfloat16, device=DEVICE)
    extent = Extent(num_layers=2, num_cells=3, num_heads=2, cell_bytes=shape.page)
    dense = dense_rows(buffer.data_ptr(), extent)
    place = {"first_layer": 1, "first_head": 1, "cell_bytes": shape.page}
    copy_rows(
        pool_rows(source.data_ptr(), shape, pages=ids(blocks), **place), dense, extent, ctas=4
    )
    assert torch.equal(buffer, source[1:][:, blocks, :, 1:3])
    copy_rows(
        dense, pool_rows(target.data_ptr(), shape, pages=ids(peer_blocks), **place), extent, ctas=4
    )
    expected[1:, :, :, 1:3][:, peer_blocks] = buffer
    assert torch.equal(target, expected)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("tokens", "peer_tokens"), [(8, 4), (4, 8), (12, 8), (2, 8)])
@pytest.mark.parametrize(("head", "peer_head", "num_heads"), [(0, 0, 4), (2, 1, 2), (3, 0, 1)])
def test_between_blocks_of_different_sizes(staged, tokens, peer_tokens, head, peer_head, num_heads):
    dim, dtype, first, count = 8, torch.float32, 1, 5
    source, shape = make_pool(20, 4, dim, dtype, seed=1, tokens=tokens)
    target, peer_shape = make_pool(20, 4, dim, dtype, seed=2, tokens=peer_tokens)
    size = math.gcd(tokens, peer_tokens)
    need = (first + count) * size
    blocks = tuple(range(17, 0, -1))[: -(-need // tokens)]
    peer_blocks = tuple(range(2, 20))[: -(-need // peer_tokens)]
    cell_bytes = size * dim * dtype.itemsize
    sides = []
    for pool, its, row, block_size, first_head in (
        (source, shape, blocks, tokens, head),
        (target, peer_shape, peer_blocks, peer_tokens, peer_head),
    ):
        cells = Cells.within(row, block_size, size=size, first=first, count=count)
        sides.append(
            pool_rows(
                pool.data_ptr(),
                its,
                first_layer=1,
                first_head=first_head,
                cell_bytes=cell_bytes,
                pages=ids(its.pages(cells, cell_bytes)),
            )
        )
    extent = Extent(num_layers=2, num_cells=count, num_heads=num_heads, cell_bytes=cell_bytes)
    expected = target.clone()
    for token in range(first * size, need):
        block, at = divmod(token, tokens)
        picked = source[1:, blocks[block], :, head : head + num_heads, at]
        block, at = divmod(token, peer_tokens)
        expected[1:, peer_blocks[block], :, peer_head : peer_head + num_heads, at] = picked
    if staged:
        buffer = torch.zeros(2, count, 2, num_heads, size, dim, device=DEVICE)
        dense = dense_rows(buffer.data_ptr(), extent)
        copy_rows(sides[0], dense, extent, ctas=3)
        copy_rows(dense, sides[1], extent, ctas=3)
    else:
        copy_rows(*sides, extent, ctas=3)
    assert torch.equal(target, expected)


def test_what_is_not_aligned_is_refused():
    source, shape = make_pool(2, 1, 16, torch.float32, seed=1)
    rows = pool_rows(
        source.data_ptr(), shape, first_layer=0, first_head=0, cell_bytes=12, pages=ids([0])
    )
    extent = Extent(num_layers=1, num_cells=1, num_heads=1, cell_bytes=12)
    with pytest.raises(ValueError, match="not aligned"):
        copy_rows(rows, rows, extent, ctas=1)
