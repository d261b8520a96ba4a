"""Hand-offs whose sender writes into decode's pool by itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from kv_transfer.backends import host
from kv_transfer.backends.choice import choose_backend
from kv_transfer.backends.host import (
    has_ended,
    has_followers,
    host_id,
    may_share_host,
    process_id,
    worker_processes,
)
from kv_transfer.config import BackendName, ChecksumKind
from kv_transfer.control.context import CallResult
from kv_transfer.control.incoming import writer_stopped
from kv_transfer.data.threads import await_callback
from kv_transfer.plan.states import GrantState
from protocol.errors import DeadlineExceeded, ErrorCode, HandoffFailed, StaleMessage, Unavailable
from protocol.messages import LinkAddress
from rpc import methods
from tests.support.held import Held
from tests.support.one_sided import OneSidedBackend, OneSidedHub
from tests.support.transfer import PATIENT, Pair, differing, fill, make_layout, random_kv, reply_of
from tests.support.transfer_steps import DEST, KEY, LAYOUT, OTHER, SOURCE, disturb, moves, ready

HASTY = replace(PATIENT, op_timeout_s=0.2, rpc_timeout_s=0.2, rpc_attempts=1, repair_s=0.05)


@pytest.fixture
def pools():
    return OneSidedHub()


@pytest.fixture
def backends(pools):
    return lambda: OneSidedBackend(pools)


async def sent(pair):
    """All of it, and the commit."""
    kv = await ready(pair)
    pair.sender.push(KEY, SOURCE, 0)
    pair.sender.commit(KEY, (1,))
    return kv


@pytest.mark.parametrize(("source_tp", "dest_tp"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", ChecksumKind)
async def test_every_pair_of_degrees_moves_the_same_bits(backends, source_tp, dest_tp, kind):
    source, dest = make_layout(source_tp), make_layout(dest_tp)
    kv = random_kv(source, 5, seed=1)
    config = replace(PATIENT, checksum=kind)
    async with Pair(source=source, dest=dest, backends=backends, config=config) as pair:
        fill(pair.prefill.pools, source, SOURCE, kv)
        await pair.run(KEY, SOURCE, DEST)
        assert differing(pair.decode.pools, dest, DEST, kv) == []
        assert pair.sender.num_live == pair.receiver.num_live == 0
        called = [name for name, _ in pair.clients.calls]
        assert called == ["Grant", "Commit"]
        assert pair.receiver.stats.num_bytes == pair.sender.stats.num_bytes
        assert pair.receiver.stats.num_bytes == 5 * source.token_bytes() * source.block_size


async def test_content_that_changed_on_the_way_is_refused(backends):
    config = replace(PATIENT, checksum=ChecksumKind.SUM)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=config) as pair:

        async def corrupt(address, method, request):
            if method is methods.COMMIT:
                pair.decode.pools[0].layers[1][DEST[2]] += 1

        pair.clients.intercept = corrupt
        await sent(pair)
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.ended_with(KEY).param == "checksum"


async def test_content_that_could_not_be_read_is_read_again(backends):
    """A rank had no memory to sum it in: neither this hand-off nor those that follow fail."""
    config = replace(PATIENT, checksum=ChecksumKind.SUM)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=config) as pair:
        troubles = [RuntimeError("out of memory")]

        def trouble():
            if troubles:
                raise troubles.pop()

        pair.decode.pools[0].before_gather = trouble
        kv = await sent(pair)
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        await pair.run(OTHER, SOURCE, (0, 3, 4, 5, 6))
        assert [key for key, _ in pair.decode.events.commits] == [KEY, OTHER]
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


@pytest.mark.parametrize("how", ["lost", "reply lost", "twice"])
@pytest.mark.parametrize("method", [methods.GRANT, methods.COMMIT])
async def test_one_message_lost_or_repeated_changes_nothing(backends, method, how):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        hit = disturb(pair, method, how)
        kv = await sent(pair)
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        assert hit
        assert len(pair.decode.events.commits) == len(pair.prefill.events.commits) == 1
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


@pytest.mark.parametrize(
    "change",
    [
        {"num_cells": 6},
        {"first_cell": 1},
        {"generation": 99},
        {"num_layers": 3},
        {"prefill_layout": make_layout(2, head_dim=16)},
    ],
)
async def test_a_commit_that_names_other_pieces_gets_nothing(backends, change):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:

        async def forge(address, method, request):
            if method is methods.COMMIT:
                (piece,) = request.written
                with pytest.raises((StaleMessage, HandoffFailed)):
                    forged = structs.replace(request, written=(structs.replace(piece, **change),))
                    await reply_of(pair.receiver.on_commit, forged)

        pair.clients.intercept = forge
        await sent(pair)
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        await pair.decode.events.wait(lambda e: e.is_over(KEY))


# --- blocks are not reused while a writer may reach them -----------------------------------------


async def writing(pair):
    """Prefill's ranks write until they are let go."""
    held = Held()
    for pool in pair.decode.pools:
        pool.before_scatter = held
    await ready(pair)
    pair.sender.push(KEY, SOURCE, 0)
    assert await asyncio.to_thread(held.begun)
    return held


async def test_blocks_wait_for_a_write_in_progress(backends):
    """Decode leaves while a rank of prefill writes: the blocks are safe only after that."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        held = await writing(pair)
        await pair.receiver.end(KEY, True)
        assert pair.receiver.num_blocks(GrantState.QUARANTINED) == 5
        await asyncio.sleep(0.1)
        assert pair.decode.events.safe == []
        held.release()
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.safe == [(KEY, DEST)]
        assert pair.receiver.num_blocks(GrantState.QUARANTINED) == 0


async def test_a_sender_that_leaves_says_so_after_its_last_write(backends):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        held = await writing(pair)
        leaving = asyncio.create_task(pair.sender.end(KEY, True))
        await asyncio.sleep(0.1)
        assert pair.decode.events.ends == pair.decode.events.safe == []
        held.release()
        await leaving
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.ended_with(KEY) is None


async def test_a_sender_that_has_left_confirms_only_after_its_last_write(backends):
    """Both sides leave while it writes: decode's message must not overtake the write."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        held = await writing(pair)
        leaving = asyncio.create_task(pair.sender.end(KEY, True))
        await asyncio.sleep(0)
        await pair.receiver.end(KEY, True)
        await asyncio.sleep(0.1)
        assert [end.epoch for end in moves(pair.clients, "End")] == [pair.decode.ref.epoch]
        assert pair.decode.events.safe == []
        held.release()
        await leaving
        await pair.decode.events.wait(lambda e: e.safe)


def frozen(pair):
    """Nothing that decode asks of prefill is answered."""

    async def silent(address, method, request):
        if address == pair.prefill.ref.address:
            await asyncio.sleep(0.05)
            raise DeadlineExceeded("frozen")

    return silent


async def test_a_frozen_senders_blocks_stay_quarantined_until_it_answers(backends):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=HASTY) as pair:
        await ready(pair)
        pair.clients.intercept = frozen(pair)
        await pair.receiver.end(KEY, True)
        await asyncio.sleep(3 * HASTY.op_timeout_s)
        assert pair.decode.events.safe == []
        assert pair.receiver.num_blocks(GrantState.QUARANTINED) == 5
        pair.clients.intercept = None
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.receiver.num_blocks(GrantState.QUARANTINED) == 0


async def test_a_silent_sender_is_given_up_at_once_and_its_blocks_later(backends):
    """The membership has taken it off: it may be dead, or frozen and thaw."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=HASTY) as pair:
        await ready(pair)
        pair.clients.intercept = frozen(pair)
        await pair.receiver.peer_lost(pair.prefill.ref.epoch)
        assert pair.decode.events.ended_with(KEY).code is ErrorCode.HANDOFF_FAILED
        await asyncio.sleep(2 * HASTY.op_timeout_s)
        assert pair.decode.events.safe == []
        assert pair.receiver.num_blocks(GrantState.QUARANTINED) == 5
        pair.clients.intercept = None
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.safe == [(KEY, DEST)]


@pytest.mark.parametrize("news", ["connection refused", "another incarnation"])
async def test_a_dead_senders_blocks_come_back(backends, news):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=HASTY) as pair:
        await ready(pair)

        async def gone(address, method, request):
            if address == pair.prefill.ref.address:
                await asyncio.sleep(0.01)
                if news == "another incarnation":
                    raise StaleMessage("not the one you mean", param="epoch")
                raise Unavailable("gone", param="address")

        pair.clients.intercept = gone
        began = asyncio.get_running_loop().time()
        await pair.receiver.end(KEY, True)
        await pair.decode.events.wait(lambda e: e.safe)
        if news == "connection refused":
            assert asyncio.get_running_loop().time() - began >= HASTY.op_timeout_s


@pytest.mark.parametrize("error", [DeadlineExceeded("no route"), Unavailable("timed out")])
async def test_a_vanished_sender_on_another_host_frees_its_blocks(backends, error):
    """It cannot write over CUDA IPC, so nothing has to prove its death."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=HASTY) as pair:
        pair.prefill.ref = structs.replace(pair.prefill.ref, process="another host|pid:[1]|1:1")

        async def gone(address, method, request):
            if address == pair.prefill.ref.address:
                raise error

        await ready(pair)
        pair.clients.intercept = gone
        await pair.receiver.end(KEY, True)
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.safe == [(KEY, DEST)]
        assert pair.receiver.num_blocks(GrantState.QUARANTINED) == 0


async def test_a_sender_whose_process_has_ended_counts_as_dead(backends):
    """On this host its process proves it, whatever the network says of its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from kv_transfer.backends.host import process_id; print(process_id()); input()",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    name = (await process.stdout.readline()).decode().strip()
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=HASTY) as pair:
        pair.prefill.ref = structs.replace(pair.prefill.ref, process=name)
        await ready(pair)
        pair.clients.intercept = frozen(pair)
        await pair.receiver.end(KEY, True)
        await asyncio.sleep(2 * HASTY.op_timeout_s)
        assert may_share_host(name)
        assert not has_ended(name)
        assert pair.receiver.num_blocks(GrantState.QUARANTINED) == 5
        process.stdin.write(b"\n")
        await process.wait()
        assert has_ended(name)
        await pair.decode.events.wait(lambda e: e.safe)


@contextlib.contextmanager
def ranks_of_a_worker(count):
    """Processes that end when a line comes, and their names."""
    code = "from kv_transfer.backends.host import process_id; print(process_id()); input()"
    with contextlib.ExitStack() as stack:
        ranks = []
        for _ in range(count):
            rank = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-uc", code],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(rank.kill)
            ranks.append(rank)
        yield ranks, [rank.stdout.readline().strip() for rank in ranks]


@pytest.mark.parametrize("news", ["connection refused", "another incarnation", "no answer"])
async def test_a_frozen_follower_may_write_after_rank_0_is_gone(backends, news):
    """A rank of a tensor-parallel worker writes by itself, in a process of its own."""
    errors = {
        "connection refused": Unavailable("gone", param="address"),
        "another incarnation": StaleMessage("not the one you mean", param="epoch"),
        "no answer": DeadlineExceeded("no answer"),
    }

    async def gone(address, method, request):
        if address == pair.prefill.ref.address:
            await asyncio.sleep(0.01)
            raise errors[news]

    with ranks_of_a_worker(3) as (ranks, names):
        async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=HASTY) as pair:
            processes = worker_processes(names)
            pair.prefill.ref = structs.replace(pair.prefill.ref, process=processes)
            await ready(pair)
            pair.clients.intercept = gone
            ranks[0].kill()
            ranks[0].wait()
            ranks[1].send_signal(signal.SIGSTOP)
            await pair.receiver.end(KEY, True)
            await asyncio.sleep(3 * HASTY.op_timeout_s)
            assert pair.receiver.num_blocks(GrantState.QUARANTINED) == 5
            for rank in ranks[1:]:
                rank.kill()
                rank.wait()
            await pair.decode.events.wait(lambda e: e.safe)
            assert has_ended(processes)


def test_processes_of_ranks_that_are_not_all_known_prove_nothing():
    other = "another host|pid:[1]|1:1"
    for ranks in (["", process_id()], [process_id(), ""], [process_id(), other]):
        assert worker_processes(ranks) == ""
    assert not has_ended("")
    assert not has_followers("")
    assert not has_followers(process_id())
    assert has_followers(
        worker_processes(["{}|{}|1:1".format(*process_id().split("|")), process_id()])
    )


def test_a_process_has_not_ended_while_one_of_its_threads_runs():
    """Its first thread may have: the kernel then shows a zombie, which still writes."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import ctypes, os, threading\n"
            "from kv_transfer.backends.host import process_id\n"
            "def work():\n"
            "    input()\n"
            "    os._exit(0)\n"
            "print(process_id(), flush=True)\n"
            "threading.Thread(target=work).start()\n"
            "ctypes.CDLL(None).pthread_exit(None)\n",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    name = process.stdout.readline().strip()
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert not has_ended(name)
    process.stdin.write("\n")
    process.stdin.close()
    while Path(f"/proc/{process.pid}/task").exists() and not has_ended(name):
        time.sleep(0.01)
    assert has_ended(name)  # not reaped yet
    process.wait()
    assert has_ended(name)
    process.stdout.close()


def test_a_process_that_cannot_be_looked_at_has_not_ended(monkeypatch):
    """For want of a file descriptor, for example."""
    other = process_id()
    monkeypatch.setattr(host, "process_id", lambda: other)

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert not has_ended(other)


async def test_a_sender_that_refuses_a_grant_may_still_write(backends):
    """It has left while it wrote a piece again that decode could not read."""
    config = replace(HASTY, checksum=ChecksumKind.SUM)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=config) as pair:
        held = Held()

        def trouble():
            pair.decode.pools[0].before_gather = lambda: None
            pair.decode.pools[0].before_scatter = held
            raise RuntimeError("out of memory")

        pair.decode.pools[0].before_gather = trouble
        await sent(pair)
        assert await asyncio.to_thread(held.begun)
        leaving = asyncio.create_task(pair.sender.end(KEY, True))
        await pair.decode.events.wait(lambda e: e.is_over(KEY))
        await asyncio.sleep(HASTY.op_timeout_s)
        assert pair.decode.events.safe == []
        held.release()
        await leaving
        await pair.decode.events.wait(lambda e: e.safe)


class Thawing:
    """A rank channel whose rank 1 can freeze: what it is told then, it does when it thaws."""

    def __init__(self, ranks):
        self._ranks = ranks
        self._late = []
        self.frozen = False

    def submit(self, rank, command, finish):
        if rank == 1 and self.frozen:
            self._late.append(command)
            raise Unavailable("rank 1 is silent")
        self._ranks.submit(rank, command, finish)

    async def thaw(self):
        for command in self._late:
            await await_callback(partial(self._ranks.submit, 1, command))


async def test_a_frozen_rank_of_a_sender_may_still_write(backends):
    """Rank 0 of prefill has given it up and answers for it, but cannot know that it has stopped."""
    channels = []

    def wrap(ranks):
        channels.append(Thawing(ranks))
        return channels[-1]

    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=HASTY, wrap=wrap) as pair:
        kv = await ready(pair)
        channels[0].frozen = True
        pair.sender.push(KEY, SOURCE, 0)
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        assert pair.prefill.events.ended_with(KEY).code is ErrorCode.HANDOFF_FAILED
        await pair.receiver.end(KEY, True)
        await asyncio.sleep(2 * HASTY.op_timeout_s)
        assert pair.receiver.num_blocks(GrantState.QUARANTINED) == 5
        await channels[0].thaw()
        assert (
            differing(
                pair.decode.pools[1:], structs.replace(LAYOUT, rank_heads=((2, 4),)), DEST, kv
            )
            == []
        )
        assert pair.decode.events.safe == []
        del pair.clients.handlers[pair.prefill.ref.address]  # its process has ended
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.safe == [(KEY, DEST)]


@pytest.mark.parametrize("sign", [DeadlineExceeded("x"), Unavailable("no file left")])
async def test_silence_alone_is_no_proof(backends, sign):
    """A frozen process refuses nothing, and who cannot call learns nothing of it."""
    gone = Unavailable("x", param="address")
    answers = iter([gone, sign, gone, sign, None])
    asked = []

    async def ask():
        asked.append(1)
        return CallResult(error=next(answers), uncertain=True)

    config = replace(HASTY, op_timeout_s=0.06, repair_s=0.05)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=config) as pair:
        await asyncio.wait_for(writer_stopped(ask, pair.prefill.ref, pair.receiver._context), 60)
    assert len(asked) == 5


# --- which way ------------------------------------------------------------------------------------


def link(backend, rank=0, endpoint=""):
    return LinkAddress(rank=rank, backend=backend, endpoint=endpoint)


def test_the_first_way_that_reaches_every_rank_is_taken():
    near, far = f"{host_id()}|x", "another-host|x"
    auto = BackendName.AUTO
    both = [link("cuda_ipc", endpoint=near), link("nccl")]
    assert choose_backend(auto, both, num_ranks=1) == "cuda_ipc"
    assert choose_backend(auto, both, num_ranks=1, refused={"cuda_ipc"}) == "nccl"
    assert choose_backend(BackendName.NCCL, both, num_ranks=1) == "nccl"
    apart = [link("cuda_ipc", endpoint=far), link("nccl")]
    assert choose_backend(auto, apart, num_ranks=1) == "nccl"
    partly = [link("cuda_ipc", 0, near), link("nccl", 0), link("nccl", 1)]
    assert choose_backend(auto, partly, num_ranks=2) == "nccl"


@pytest.mark.parametrize(
    ("wanted", "offers"),
    [
        (BackendName.TCP, ["nccl"]),
        (BackendName.CUDA_IPC, ["nccl", "tcp"]),
        (BackendName.AUTO, []),
        (BackendName.AUTO, ["pigeon"]),
        (BackendName.AUTO, ["cuda_ipc"]),
    ],
)
def test_without_a_common_way_the_field_is_named(wanted, offers):
    with pytest.raises(HandoffFailed) as caught:
        choose_backend(wanted, [link(offer) for offer in offers], num_ranks=1)
    assert caught.value.param == "backend"


async def test_a_pool_that_cannot_be_mapped_is_not_tried_again(backends, pools):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        pools.closed.update(range(len(pools.pools)))
        for key, dest in ((KEY, DEST), (OTHER, (0, 3, 4, 5, 6))):
            await ready(pair, key, dest=dest)
            if key not in dict(pair.prefill.events.ends):
                pair.sender.push(key, SOURCE, 0)
            await pair.prefill.events.wait(lambda e, key=key: e.is_over(key))
            error = pair.prefill.events.ended_with(key)
            assert (error.code, error.param) == (ErrorCode.HANDOFF_FAILED, "backend")
        await pair.decode.events.wait(lambda e: len(e.safe) == 2)
