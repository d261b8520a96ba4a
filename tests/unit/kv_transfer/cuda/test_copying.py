"""The paged copy against indexing; where there is no GPU, its plain form, compiled for the CPU."""

import ctypes
import math
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kv_transfer.cuda import copying
from kv_transfer.cuda.copying import (
    Extent,
    PageTable,
    PoolShape,
    copy_rows,
    dense_rows,
    load_conversions,
    load_copies,
    pool_rows,
)
from protocol.kv_layout import Cells

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, TOKENS = 3, 4
TILE = 64
ON_CPU = """
#define __device__
#define __global__
#define __grid_constant__
#define __align__ alignas
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } blockIdx, gridDim, threadIdx, blockDim;
#include "copy_rows.cu"
#define FOR_CPU(name) \\
    extern "C" void run_##name(const Rows* source, const Rows* target, const Size* size, \\
                               unsigned blocks) { \\
        for (gridDim = {blocks}, blockDim = {3}, blockIdx = {0}; blockIdx.x < blocks; \\
             blockIdx.x++) \\
            for (threadIdx = {0}; threadIdx.x < blockDim.x; threadIdx.x++) \\
                name(*source, *target, *size); \\
    }
FOR_CPU(copy_rows)
FOR_CPU(narrow_rows)
FOR_CPU(widen_rows)
"""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """Makes kernels that are functions of this process."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("copy")
    source, library = folder / "copy.cpp", folder / "copy.so"
    source.write_text(ON_CPU)
    include = Path(copying.__file__).parent
    command = [compiler, "-shared", "-fPIC", f"-I{include}", f"-DTILE={TILE}", "-DSLOTS=2"]
    for number in range(3):
        made = f"{library}{number}"
        subprocess.run([*command, f"-DNUMBER={number}", str(source), "-o", made], check=True)

    def kernel(name, number=0):
        run = getattr(ctypes.CDLL(f"{library}{number}"), f"run_{name}")

        def launch(blocks, stream, *args):
            run(*(ctypes.byref(arg) for arg in args), blocks)

        return SimpleNamespace(launch=launch)

    return kernel


@pytest.fixture
def copy(request, monkeypatch):
    """copy_rows on the device's own stream; on a GPU with tiles of its own size."""
    if DEVICE.type == "cuda":
        stream = torch.cuda.current_stream(DEVICE).cuda_stream
        return partial(copy_rows, kernel=load_copies(DEVICE), stream=stream)
    monkeypatch.setattr(copying, "_TILE", TILE)
    return partial(copy_rows, kernel=request.getfixturevalue("on_cpu")("copy_rows"), stream=0)


@pytest.fixture
def convert(request, monkeypatch):
    """The same, between numbers of a type and codes: convert(narrows, dtype, ...)."""
    if DEVICE.type == "cuda":
        stream = torch.cuda.current_stream(DEVICE).cuda_stream

        def on_gpu(narrows, dtype, *args, **named):
            made = load_conversions(DEVICE, str(dtype).split(".")[1])
            copy_rows(*args, kernel=made.narrow if narrows else made.widen, stream=stream, **named)

        return on_gpu
    monkeypatch.setattr(copying, "_CONVERTED", TILE)
    kernels = request.getfixturevalue("on_cpu")

    def on_host(narrows, dtype, *args, **named):
        number = [torch.bfloat16, torch.float16, torch.float32].index(dtype)
        kernel = kernels("narrow_rows" if narrows else "widen_rows", number)
        copy_rows(*args, kernel=kernel, stream=0, **named)

    return on_host


def make_pool(num_blocks, num_heads, dim, dtype, seed, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, num_blocks, 2, num_heads, tokens, dim)
    pool = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    page = tokens * dim * dtype.itemsize
    name = str(dtype).split(".")[1]
    return pool, PoolShape(num_blocks=num_blocks, num_heads=num_heads, page=page, dtype=name)


@pytest.fixture
def ids():
    """Page numbers on the device, for as long as the test runs: where they are."""
    kept = []

    def load(numbers):
        kept.append(torch.tensor(numbers, dtype=torch.int32, device=DEVICE))
        return kept[-1].data_ptr()

    return load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ctas", [1, 3, 1000])
@pytest.mark.parametrize(
    ("first_layer", "num_layers", "head", "peer_head", "num_heads", "peer_heads"),
    [(0, 3, 0, 0, 4, 4), (1, 2, 1, 0, 3, 3), (2, 1, 3, 1, 1, 2), (0, 3, 0, 2, 2, 4)],
)
def test_between_pools(
    copy, ids, dtype, ctas, first_layer, num_layers, head, peer_head, num_heads, peer_heads
):
    source, shape = make_pool(7, 4, 24, dtype, seed=1)
    target, peer_shape = make_pool(9, peer_heads, 24, dtype, seed=2)
    blocks, peer_blocks = [5, 1, 3, 6], [0, 8, 4, 2]
    expected = target.clone()
    layers = slice(first_layer, first_layer + num_layers)
    picked = source[layers][:, blocks, :, head : head + num_heads]
    expected[layers, :, :, peer_head : peer_head + num_heads][:, peer_blocks] = picked
    copy(
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


def test_through_a_dense_buffer(copy, ids):
    source, shape = make_pool(7, 4, 16, torch.bfloat16, seed=1)
    target, _ = make_pool(7, 4, 16, torch.bfloat16, seed=2)
    expected = target.clone()
    blocks, peer_blocks = [6, 0, 2], [1, 5, 3]
    buffer = torch.zeros((2, 3, 2, 2, TOKENS, 16), dtype=torch.bfloat16, device=DEVICE)
    extent = Extent(num_layers=2, num_cells=3, num_heads=2, cell_bytes=shape.page)
    dense = dense_rows(buffer.data_ptr(), extent)
    place = {"first_layer": 1, "first_head": 1, "cell_bytes": shape.page}
    copy(pool_rows(source.data_ptr(), shape, pages=ids(blocks), **place), dense, extent, ctas=4)
    assert torch.equal(buffer, source[1:][:, blocks, :, 1:3])
    copy(
        dense, pool_rows(target.data_ptr(), shape, pages=ids(peer_blocks), **place), extent, ctas=4
    )
    expected[1:, :, :, 1:3][:, peer_blocks] = buffer
    assert torch.equal(target, expected)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("tokens", "peer_tokens"), [(8, 4), (4, 8), (12, 8), (2, 8)])
@pytest.mark.parametrize(("head", "peer_head", "num_heads"), [(0, 0, 4), (2, 1, 2), (3, 0, 1)])
def test_between_blocks_of_different_sizes(
    copy, ids, staged, tokens, peer_tokens, head, peer_head, num_heads
):
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
        copy(sides[0], dense, extent, ctas=3)
        copy(dense, sides[1], extent, ctas=3)
    else:
        copy(*sides, extent, ctas=3)
    assert torch.equal(target, expected)


NUMBERS = [torch.bfloat16, torch.float16, torch.float32]
CODES = torch.float8_e4m3fn


def all_numbers(dtype):
    """Every number of 16 bits, or many of 32."""
    if dtype is torch.float32:
        bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), dtype=torch.int64).int()
        return torch.cat([bits.view(dtype), torch.randn(1 << 16) * torch.logspace(-5, 4, 1 << 16)])
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short().view(dtype)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_number_becomes_its_code_and_every_code_its_number(convert, dtype):
    numbers = all_numbers(dtype)
    count = numbers.numel() // 16
    source, codes = numbers.to(DEVICE), torch.empty(count * 16, dtype=torch.uint8, device=DEVICE)

    def rows(tensor):
        extent = Extent(num_layers=1, num_cells=count // 2, num_heads=1, cell_bytes=16)
        extent = replace(extent, cell_bytes=16 * tensor.itemsize)
        return dense_rows(tensor.data_ptr(), extent), extent

    (left, extent), (right, narrow) = rows(source), rows(codes)
    convert(True, dtype, left, right, extent, ctas=7, items=(source.itemsize, 1))
    got, exact = codes.cpu().view(CODES).float(), numbers.float()
    assert torch.equal(got.isnan(), exact.isnan())
    assert torch.equal(got.signbit(), exact.signbit())
    assert torch.equal(got.nan_to_num(), exact.clamp(-448, 448).to(CODES).float().nan_to_num())
    codes.copy_(torch.arange(count * 16).to(torch.uint8))
    convert(False, dtype, right, left, narrow, ctas=7, items=(1, source.itemsize))
    got, exact = source.cpu().float(), codes.cpu().view(CODES).float()  # GPUs drop signs of NaN
    assert torch.equal(got.isnan(), exact.isnan())
    assert torch.equal(got.signbit(), exact.signbit())
    assert torch.equal(got.nan_to_num(), exact.nan_to_num())


@pytest.mark.parametrize("narrows", [True, False])
@pytest.mark.parametrize(("tokens", "peer_tokens"), [(4, 4), (8, 4), (4, 8)])
@pytest.mark.parametrize(("head", "peer_head", "num_heads"), [(0, 0, 4), (2, 1, 2)])
def test_between_pools_of_two_types(
    convert, ids, narrows, tokens, peer_tokens, head, peer_head, num_heads
):
    """Into blocks of the same and of other sizes, all heads or some."""
    dim, count, size = 16, 5, 4
    types = (torch.bfloat16, torch.uint8) if narrows else (torch.uint8, torch.bfloat16)
    sides, pools = [], []
    for seed, (dtype, block, first) in enumerate(
        zip(types, (tokens, peer_tokens), (head, peer_head), strict=True)
    ):
        pool, _ = make_pool(20, 4, dim, torch.bfloat16, seed, block)
        if dtype is torch.uint8:
            pool = pool.to(CODES).view(torch.uint8)
        page = block * dim * dtype.itemsize
        shape = PoolShape(num_blocks=20, num_heads=4, page=page, dtype=str(dtype).split(".")[1])
        row = tuple(range(17, 0, -1)) if seed else tuple(range(3, 20))
        cells = Cells.within(row, block, size=size, first=1, count=count)
        cell = size * dim * dtype.itemsize
        place = {"first_layer": 1, "first_head": first, "cell_bytes": cell}
        sides.append(
            pool_rows(pool.data_ptr(), shape, pages=ids(shape.pages(cells, cell)), **place)
        )
        pools.append((pool, row, block, first))
    extent = Extent(
        num_layers=2,
        num_cells=count,
        num_heads=num_heads,
        cell_bytes=size * dim * types[0].itemsize,
    )
    (source, blocks, _, _), (target, peer_blocks, _, _) = pools
    expected = target.clone()
    for token in range(size, size * (1 + count)):
        block, at = divmod(token, tokens)
        picked = source[1:, blocks[block], :, head : head + num_heads, at]
        picked = picked.to(CODES).view(torch.uint8) if narrows else picked.view(CODES).bfloat16()
        block, at = divmod(token, peer_tokens)
        expected[1:, peer_blocks[block], :, peer_head : peer_head + num_heads, at] = picked
    items = types[0].itemsize, types[1].itemsize
    convert(narrows, torch.bfloat16, *sides, extent, ctas=3, items=items)
    assert torch.equal(target, expected)


def test_what_is_not_aligned_is_refused(copy, ids):
    source, shape = make_pool(2, 1, 16, torch.float32, seed=1)
    rows = pool_rows(
        source.data_ptr(), shape, first_layer=0, first_head=0, cell_bytes=12, pages=ids([0])
    )
    extent = Extent(num_layers=1, num_cells=1, num_heads=1, cell_bytes=12)
    with pytest.raises(ValueError, match="not aligned"):
        copy(rows, rows, extent, ctas=1)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_page_numbers_reach_the_device():
    table = PageTable(DEVICE)
    stream = torch.cuda.Stream(DEVICE)
    for length in (3, 1500, 9000):  # the last is more than it has room for at first
        lists = list(range(length)), [], list(range(length, 0, -1))
        starts = table.load(stream.cuda_stream, *lists)
        stream.synchronize()
        first, empty, last = (start - starts[0] for start in starts)
        assert (first, empty, last) == (0, 4 * length, 4 * length)
        assert table._ids[: 2 * length].tolist() == [*lists[0], *lists[2]]
        assert starts[0] == table._ids.data_ptr()
