"""Rank 0's end of a tensor-parallel engine: sends commands, which every follower runs in order.

Rank 0 creates a RankGroup and gives its invite to the follower processes. Commands travel over one
authenticated connection per follower; tensors through a TensorParallel group, formed once every
rank has loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import weakref
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

from engine.batch import StepBatch
from engine.errors import RankLost
from engine.ranks.messages import (
    CHANNEL_PURPOSE,
    Command,
    EngineCommand,
    RankInvite,
    Report,
    ReportKind,
    open_store,
)
from engine.ranks.step_messages import StepWriter
from engine.ranks.tensor_parallel import TensorParallel
from framing.channel import Channel, ChannelClosed
from observability.logging import get_logger
from protocol import codec
from protocol.errors import BatonError

__all__ = ["RankGroup", "RankInvite"]
#: Interval at which `accept` checks whether all ranks have joined.
_JOIN_CHECK_S = 0.05
#: All ranks are on one host.
_HOST = "127.0.0.1"
log = get_logger(__name__)

_OWNER = "owner"  # a file in each temporary folder, locked as long as its process lives


class RankGroup:
    """Rank 0's end of all followers. Commands may come from any thread.

    A follower that dies, fails or sends nothing for `silence_s` breaks the group: pending and later
    calls fail with RankLost.
    """

    def __init__(
        self,
        size: int,
        *,
        timeout_s: float = 20.0,
        silence_s: float = 10.0,
    ) -> None:
        self.size = size
        self._silence_s = silence_s
        self._server = socket.create_server((_HOST, 0), backlog=size)
        # NCCL reads its store as long as it lives: the folder goes with this object or process.
        self._folder = ProcessTempdir(_ranks_folder())
        self.invite = RankInvite(
            host=_HOST,
            port=self._server.getsockname()[1],
            store=str(self._folder.path / "store"),
            size=size,
            timeout_s=timeout_s,
            authkey=secrets.token_bytes(32),
        )
        self.tp = TensorParallel(0, size)
        self._channels: dict[int, Channel] = {}
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._calls: dict[int, Future[bytes]] = {}
        self._next_call = 0
        self._loaded: dict[int, Future[int]] = {}
        self._lost: RankLost | None = None
        self._closing = False
        self._num_steps = 0
        self._steps = StepWriter()
        self._reports: dict[int, Report] = {}  # the latest of each follower

    def accept(self, timeout_s: float) -> None:
        """Wait until every follower has connected; loading may take longer. Idempotent.

        Raises RankLost naming the missing ranks. Connections without the key are refused.
        """
        deadline = time.monotonic() + timeout_s
        while missing := set(range(1, self.size)) - set(self._channels):
            left = deadline - time.monotonic()
            if left <= 0:
                raise RankLost(f"ranks {sorted(missing)} did not join in {timeout_s} s", param="tp")
            self._server.settimeout(min(left, _JOIN_CHECK_S))
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            # A thread each: a silent connection must not hold up the next one.
            threading.Thread(
                target=self._admit, args=(connection,), name="rank-handshake", daemon=True
            ).start()

    def num_blocks(self, own: int, timeout_s: float) -> int:
        """Wait until every follower has loaded; the KV blocks that each rank has memory for, `own`
        of them on rank 0. Raises RankLost."""
        counts = [own]
        for rank, loaded in self._loaded.items():
            try:
                counts.append(loaded.result(timeout_s))
            except TimeoutError:
                self._lose(rank, f"did not load in {timeout_s} s")
                break
        self.check()
        if min(counts) < own:
            log.warning("a rank has less memory than rank 0", extra={"blocks": counts})
        return min(counts)

    def open(self, num_blocks: int) -> None:
        """Open each follower's pool of `num_blocks`, form the tensor group."""
        self._send_all(EngineCommand(command=Command.OPEN, number=num_blocks))
        self.tp.connect(open_store(self.invite), self.invite.host, self.invite.timeout_s)

    def step(self, batch: StepBatch) -> None:
        """Send `batch` to every follower; the caller then runs it on rank 0."""
        self._num_steps += 1
        self._send_all(EngineCommand(command=Command.STEP, payload=self._steps.encode(batch)))

    def call(self, rank: int, kind: str, payload: bytes) -> Future[bytes]:
        """Run the follower's handler of `kind`, in order with steps; its answer or its error."""
        future: Future[bytes] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._lock:
            if self._lost is not None:
                future.set_exception(self._lost)
                return future
            number = self._next_call
            self._next_call += 1
            self._calls[number] = future
        command = EngineCommand(command=Command.CALL, number=number, kind=kind, payload=payload)
        with self._send_lock:
            self._send(rank, codec.encode(command))
        return future

    def progress(self) -> str:
        """Where each rank stands, as of its latest heartbeat, for people."""
        ranks = [f"rank 0 has sent {self._num_steps} steps{_entered(self.tp.num_entered)}"]
        for rank, report in sorted(self._reports.items()):
            where = f"in step {report.begun}" if report.begun > report.ended else "between steps"
            ended = f"{report.ended} ended"
            ranks.append(f"rank {rank} is {where}, {ended}{_entered(report.collectives)}")
        return ", ".join(ranks)

    def check(self) -> None:
        """Raise RankLost when a follower is gone."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """End the followers. Idempotent."""
        if self._closing:
            return
        self._closing = True
        closed = RankLost("the group is closed", param="tp")
        with self._lock:  # later calls fail, too
            self._lost = self._lost or closed
        with self._send_lock:
            for channel in self._channels.values():
                try:
                    channel.send(codec.encode(EngineCommand(command=Command.CLOSE)), self._limit())
                except ChannelClosed:
                    log.debug("follower was gone before the group closed")
        self._fail_calls(closed)
        self._server.close()
        self.tp.close()

    def _admit(self, connection: socket.socket) -> None:
        limit = self._limit()
        try:
            channel = Channel.server(
                connection, self.invite.authkey, purpose=CHANNEL_PURPOSE, limit=limit
            )
            rank = int.from_bytes(channel.receive(limit), "big")
        except ChannelClosed as error:
            log.warning("refused a connection", extra={"reason": error})
            return
        with self._lock:
            expected = 0 < rank < self.size and rank not in self._channels
            if expected:
                self._loaded[rank] = Future()
                self._channels[rank] = channel
        if not expected:
            log.warning("refused an unexpected rank", extra={"rank": rank})
            channel.close()
            return
        listen = threading.Thread(
            target=self._listen, args=(rank, channel), name=f"rank-{rank}", daemon=True
        )
        listen.start()

    def _send_all(self, command: EngineCommand) -> None:
        message = codec.encode(command)
        with self._send_lock:
            for rank in self._channels:
                self._send(rank, message)
        self.check()

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._channels[rank].send(message, self._limit())
        except ChannelClosed as error:
            self._lose(rank, str(error))

    def _listen(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                self._take(rank, codec.decode(Report, channel.receive(self._limit())))
        except (ChannelClosed, BatonError) as error:
            self._lose(rank, str(error))
        finally:
            channel.close()

    def _limit(self) -> float:
        """When a message that starts now must have passed."""
        return time.monotonic() + self._silence_s

    def _take(self, rank: int, report: Report) -> None:
        self._reports[rank] = report
        if report.kind is ReportKind.LOADED:
            with contextlib.suppress(InvalidStateError):  # another rank was lost before
                self._loaded[rank].set_result(report.number)
        elif report.kind is ReportKind.ANSWER:
            with self._lock:
                future = self._calls.pop(report.number, None)
            if future is None:  # it failed with another rank
                return
            if report.error is None:
                future.set_result(report.payload)
            else:
                future.set_exception(report.error.to_error())
        elif report.kind is ReportKind.BROKEN:
            raise ChannelClosed(report.error.message if report.error else "it broke")

    def _lose(self, rank: int, why: str) -> None:
        if self._closing:
            return
        error = RankLost(f"rank {rank}: {why}", param=f"rank {rank}")
        with self._lock:
            if self._lost is None:
                self._lost = error
                log.error("a rank is lost", extra={"rank": rank, "reason": why})
        self.tp.abandon(error)
        self._fail_calls(error)

    def _fail_calls(self, error: RankLost) -> None:
        with self._lock:
            calls = list(self._calls.values())
            self._calls.clear()
        futures: list[Future[bytes] | Future[int]] = [*calls, *self._loaded.values()]
        for future in futures:
            with contextlib.suppress(InvalidStateError):  # it has loaded, perhaps just now
                future.set_exception(error)


def _entered(collectives: int) -> str:
    return f" and entered {collectives} collectives" if collectives else ""


class ProcessTempdir:
    """A new folder below `parent`, removed when this object or its process ends; after a kill, by
    the next process that makes one there."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(parent)
        # Sweeps skip hidden folders: it gets its name once it is locked.
        hidden = Path(tempfile.mkdtemp(prefix=".", dir=parent))
        lock = os.open(hidden / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = hidden.rename(parent / hidden.name[1:])
        weakref.finalize(self, _remove, self.path, lock)


def _ranks_folder() -> Path:
    """Parent of the folders in which ranks of this user's engines meet."""
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}" / "ranks"


def _sweep(parent: Path) -> None:
    """Remove folders of processes that are gone."""
    for folder in parent.iterdir():
        if folder.name.startswith("."):
            continue
        with contextlib.suppress(OSError):  # in use, or swept by another process
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
