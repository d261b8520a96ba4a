"""Hand-offs between two GPUs, each side a process of its own that sees one of them, and between
four, each rank a process of its own.

With more ranks than GPUs on a side, its ranks share them. Where there is but one GPU both sides
share it, which only cuda_ipc can do.
"""

import itertools
import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.handoff.process import Process
from benchmarks.handoff.worker import make_handoff
from kv_transfer.config import BackendName, ChecksumKind, TransferConfig
from protocol.ids import RequestKey, Role
from protocol.kv_layout import FP8_KV
from tests.support import transfer

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")

BACKENDS = ("cuda_ipc", pytest.param("nccl", marks=two_gpus))
DECODE_GPU = 0 if torch.cuda.device_count() < 2 else 1
NUM_BLOCKS = 96
#: Small buffers and pieces, so that every hand-off needs several of both.
SMALL = TransferConfig(
    staging_bytes=256 << 10,
    device_piece_bytes=2 << 20,
    connect_timeout_s=30,
    lease_s=12,
    op_timeout_s=3,
    rpc_timeout_s=1,
    rpc_attempts=2,
    repair_s=1,
)
#: Long enough on the wire to be caught there.
LONG = replace(SMALL, staging_bytes=8 << 20, device_piece_bytes=32 << 20)
_numbers = itertools.count()


def make_layout(tp_size, **changes):
    wide = {"num_layers": 5, "head_dim": 64, "block_size": 16, "num_blocks": NUM_BLOCKS}
    return transfer.make_layout(tp_size, **({"dtype": "bfloat16"} | wide | changes))


class Pair:
    def __init__(self, prefill=(0,), decode=(DECODE_GPU,)):
        self.apart = len(prefill) > 1  # ranks in processes of their own
        self.prefill = Process(Role.PREFILL, *prefill)
        self.decode = Process(Role.DECODE, *decode)

    def build(self, source, dest, config):
        self.sizes = source.block_size, dest.block_size
        self.prefill.start("build", source, config, self.apart)
        self.decode.start("build", dest, config, self.apart)
        self.refs = self.prefill.result(), self.decode.result()

    def handoff(self, source, dest):
        return make_handoff(RequestKey(f"r{next(_numbers)}"), *self.refs, source, dest)

    def open(self, *handoffs):
        self.prefill.do("expect", handoffs)
        self.decode.do("reserve", handoffs)

    def check(self, seed, tokens=384, *, coded=False):
        """One hand-off whose random bits must arrive, in other blocks."""
        source = tuple(range(3, 3 + tokens // self.sizes[0]))
        dest = tuple(NUM_BLOCKS - 1 - 2 * i for i in range(tokens // self.sizes[1]))
        handoff = self.handoff(source, dest)
        self.prefill.do("fill", source, seed)
        self.open(handoff)
        self.prefill.do("send", [handoff], 1)
        self.decode.do("commits", [handoff.key])
        assert self.decode.do("wrong_layers", dest, seed, coded) == 0

    def close(self):
        self.prefill.close()
        self.decode.close()


@pytest.fixture(scope="module")
def pair():
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def wide_pair():
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 CUDA devices")
    pair = Pair((0, 1), (2, 3))
    yield pair
    pair.close()


@pytest.fixture
def own_pair():
    pair = Pair()
    yield pair
    pair.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("source", "dest"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 2)])
def test_every_pair_of_degrees_moves_the_same_bits(pair, backend, source, dest):
    config = replace(SMALL, backend=BackendName(backend))
    pair.build(make_layout(source), make_layout(dest), config)
    for seed in (1, 2):
        pair.check(seed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("source", "dest"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_ranks_on_gpus_of_their_own_move_the_same_bits(wide_pair, backend, source, dest):
    config = replace(SMALL, backend=BackendName(backend))
    wide_pair.build(make_layout(source), make_layout(dest), config)
    for seed in (1, 2):
        wide_pair.check(seed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("source_size", "dest_size"), [(32, 16), (16, 64), (24, 16), (64, 16)])
@pytest.mark.parametrize(("source", "dest"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_blocks_of_different_sizes(pair, backend, source, dest, source_size, dest_size):
    config = replace(SMALL, backend=BackendName(backend))
    layouts = [
        make_layout(tp, block_size=size) for tp, size in ((source, source_size), (dest, dest_size))
    ]
    pair.build(*layouts, config)
    for seed in (1, 2):
        pair.check(seed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("types", [("bfloat16", FP8_KV), (FP8_KV, "bfloat16"), (FP8_KV, FP8_KV)])
@pytest.mark.parametrize(("source", "dest", "sizes"), [(1, 1, (16, 16)), (2, 1, (32, 16))])
@pytest.mark.parametrize("checksum", [ChecksumKind.NONE, ChecksumKind.CRC32])
def test_pools_of_two_types(pair, backend, types, source, dest, sizes, checksum):
    config = replace(SMALL, backend=BackendName(backend), checksum=checksum)
    layouts = [
        make_layout(tp, block_size=size, dtype=dtype)
        for tp, size, dtype in zip((source, dest), sizes, types, strict=True)
    ]
    pair.build(*layouts, config)
    for seed in (1, 2):
        pair.check(seed, coded=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("source", "dest"), [(1, 1), (2, 1), (1, 2)])
def test_links_are_there_before_the_first_handoff(pair, backend, source, dest):
    config = replace(SMALL, backend=BackendName(backend))
    pair.build(make_layout(source), make_layout(dest), config)
    pair.prefill.do("meet", pair.refs[1])
    assert pair.prefill.do("backends") == [backend]
    pair.check(6)
    assert pair.prefill.do("relinked") == pair.decode.do("relinked") == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicated_heads(pair, backend):
    config = replace(SMALL, backend=BackendName(backend))
    shape = {"num_kv_heads": 2, "head_dim": 128}
    pair.build(make_layout(2, **shape), make_layout(4, **shape), config)
    pair.check(3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [ChecksumKind.SUM, ChecksumKind.CRC32])
def test_content_is_summed_on_both_sides(pair, backend, kind):
    config = replace(SMALL, backend=BackendName(backend), checksum=kind)
    pair.build(make_layout(1), make_layout(2), config)
    pair.check(4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("source", "dest"), [(1, 1), (2, 1), (1, 2)])
def test_layers_leave_behind_the_step_that_writes_them(pair, backend, source, dest):
    config = replace(SMALL, backend=BackendName(backend), device_piece_bytes=64 << 20)
    shape = {"num_layers": 12, "num_kv_heads": 8, "head_dim": 128, "num_blocks": 320}
    pair.build(make_layout(source, **shape), make_layout(dest, **shape), config)
    for seed in (1, 2):
        blocks = tuple(range(3, 303)) if seed == 1 else tuple(range(300, 0, -1))
        handoff = pair.handoff(blocks, blocks[::-1])
        pair.open(handoff)
        pair.prefill.do("fill_late", handoff, seed)
        assert pair.decode.do("wrong_layers", blocks[::-1], seed) == 0


def test_on_one_host_auto_writes_into_the_pool(pair):
    pair.build(make_layout(1), make_layout(1), SMALL)
    pair.check(5)
    assert pair.prefill.do("backends") == ["cuda_ipc"]


def long_handoffs(pair, count):
    """Each moves 1.5 GiB in pieces of 32 MiB."""
    layout = make_layout(1, num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=768 * count)
    return layout, [tuple(range(768 * index, 768 * index + 768)) for index in range(count)]


def start_long(pair, backend, count=6):
    layout, blocks = long_handoffs(pair, count)
    pair.build(layout, layout, replace(LONG, backend=BackendName(backend)))
    first = pair.handoff(blocks[0], blocks[0])
    pair.open(first)
    pair.prefill.do("send", [first], 1)
    handoffs = [pair.handoff(own, own) for own in blocks]
    pair.open(*handoffs)
    pair.prefill.start("send", handoffs, count)
    time.sleep(0.012)
    return [handoff.key for handoff in handoffs]


def wait_until_safe(pair, keys, limit_s):
    end = time.monotonic() + limit_s
    while set(pair.decode.do("safe", keys)) != set(keys):
        assert time.monotonic() < end, "blocks did not come back"
        time.sleep(0.1)


def one_more(pair):
    """The next hand-off is whole."""
    _, blocks = long_handoffs(pair, 1)
    again = pair.handoff(blocks[0], blocks[0])
    pair.prefill.do("fill", blocks[0][:64], 9)
    pair.open(again)
    pair.prefill.do("send", [again], 1)
    assert pair.decode.do("outcomes", [again.key]) == ["committed"]
    assert pair.decode.do("wrong_layers", blocks[0][:64], 9) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sender_killed_in_the_middle(own_pair, backend):
    pair = own_pair
    keys = start_long(pair, backend)
    pair.prefill.kill()
    pair.decode.do("lose", pair.refs[0].epoch)
    outcomes = pair.decode.do("outcomes", keys)
    assert set(outcomes) <= {"committed", "handoff_failed"}
    assert "handoff_failed" in outcomes
    failed = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome != "committed"]
    wait_until_safe(pair, failed, LONG.op_timeout_s + 15)
    pair.prefill = Process(Role.PREFILL, 0)
    layout, _ = long_handoffs(pair, 1)
    config = replace(LONG, backend=BackendName(backend))
    pair.refs = pair.prefill.do("build", layout, config), pair.refs[1]
    one_more(pair)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receiver_killed_in_the_middle(own_pair, backend):
    """The memory that prefill writes into loses its owner: prefill must go on with another."""
    pair = own_pair
    keys = start_long(pair, backend)
    pair.decode.kill()
    with pytest.raises(RuntimeError, match="handoff_failed"):
        pair.prefill.result()
    outcomes = pair.prefill.do("outcomes", keys)
    assert set(outcomes) <= {"committed", "handoff_failed"}
    pair.prefill.do("lose", pair.refs[1].epoch)
    pair.decode = Process(Role.DECODE, DECODE_GPU)
    layout, _ = long_handoffs(pair, 1)
    config = replace(LONG, backend=BackendName(backend))
    pair.refs = pair.refs[0], pair.decode.do("build", layout, config)
    one_more(pair)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frozen", ["decode", "prefill"])
def test_a_frozen_side_ends_in_a_typed_error_in_time(own_pair, backend, frozen):
    pair = own_pair
    keys = start_long(pair, backend)
    process, other = (
        (pair.decode, pair.prefill) if frozen == "decode" else (pair.prefill, pair.decode)
    )
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        if frozen == "prefill":
            for key in keys:
                other.do("end", key)  # as a worker does whose client has gone
            outcomes = other.do("outcomes", keys)
            assert set(outcomes) <= {"committed", "released"}
            if backend == "cuda_ipc":  # it may still write: nothing may be given back
                time.sleep(4)
                assert other.do("safe", keys) == []
        else:
            with pytest.raises(RuntimeError, match="handoff_failed"):
                other.result()
            outcomes = other.do("outcomes", keys)
            assert set(outcomes) <= {"committed", "handoff_failed"}
        assert time.monotonic() - began < 30
    finally:
        os.kill(process.pid, signal.SIGCONT)
    if frozen == "prefill":
        with pytest.raises(RuntimeError, match="released"):
            process.result()
    outcomes = pair.decode.do("outcomes", keys)
    ended = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome != "committed"]
    # The pool of a frozen decode worker is written all the same: it may wake to whole commits.
    assert ended or (frozen, backend) == ("decode", "cuda_ipc")
    wait_until_safe(pair, ended, 15)
    one_more(pair)
