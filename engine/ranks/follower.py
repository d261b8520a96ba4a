"""A follower's end of a tensor-parallel engine: joins, sends heartbeats, obeys rank 0."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from msgspec import structs

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
from engine.ranks.step_messages import StepReader
from engine.ranks.tensor_parallel import TensorParallel
from framing.channel import Channel, ChannelClosed
from protocol import codec
from protocol.errors import typed

_BEAT_S = 1.0

#: Handles a CALL in the order of commands; a Future may finish later, from any thread.
Handler = Callable[[bytes], "bytes | Future[bytes]"]


class StepRunner(Protocol):
    """One rank's model and KV pool, as a follower drives it."""

    def choose_num_blocks(self) -> int: ...

    def open(self, num_blocks: int) -> None: ...

    def follow_step(self, batch: StepBatch) -> None: ...


class Follower:
    """A follower that has joined; it sends heartbeats until `close`."""

    def __init__(self, invite: RankInvite, rank: int) -> None:
        self.rank = rank
        self.invite = invite
        self.tp = TensorParallel(rank, invite.size)
        try:
            limit = self._message_limit()
            connection = socket.create_connection((invite.host, invite.port), invite.timeout_s)
            self._channel = Channel.client(
                connection, invite.authkey, purpose=CHANNEL_PURPOSE, limit=limit
            )
            self._channel.send(rank.to_bytes(4, "big"), limit)
        except OSError as error:
            raise RankLost(f"rank {rank} cannot join: {error}", param="tp") from error
        self._ended = threading.Event()
        self._begun_steps = self._ended_steps = 0
        self._steps = StepReader()
        threading.Thread(target=self._beat, name="alive", daemon=True).start()

    def open(self, runner: StepRunner) -> None:
        """Report that the model is loaded and how many KV blocks fit beside it; wait for OPEN,
        allocate the pool, join the tensor group."""
        self._report(Report(kind=ReportKind.LOADED, number=runner.choose_num_blocks()))
        command = self._next()
        if command.command is not Command.OPEN:
            raise RankLost(f"rank 0 sent {command.command} before the group was open", param="tp")
        runner.open(command.number)
        invite = self.invite
        self.tp.connect(open_store(invite), invite.host, invite.timeout_s)

    def follow(self, runner: StepRunner, handlers: Mapping[str, Handler]) -> None:
        """Run commands until rank 0 closes the group. Raises RankLost when rank 0 is gone.

        An error in a step is reported and raised, because the ranks have diverged. An error in a
        handler becomes its answer.
        """
        try:
            while (command := self._next()).command is not Command.CLOSE:
                if command.command is Command.STEP:
                    self._begun_steps += 1
                    runner.follow_step(self._steps.decode(command.payload))
                    self._ended_steps += 1
                else:
                    self._call(command, handlers)
        except Exception as error:
            self.broken(error)
            raise
        self.close()

    def broken(self, error: Exception) -> None:
        """Report the error to rank 0 and close."""
        self._report(Report(kind=ReportKind.BROKEN, error=typed(error).info()), quiet=True)
        self.close()

    def close(self) -> None:
        """Stop the heartbeats and close the connection. Idempotent."""
        self._ended.set()
        self._channel.close()
        self.tp.close()

    def _call(self, command: EngineCommand, handlers: Mapping[str, Handler]) -> None:
        try:
            answer = handlers[command.kind](command.payload)
        except Exception as error:  # noqa: BLE001 - the answer carries it to rank 0
            self._answer(command.number, error=error)
            return
        if isinstance(answer, bytes):
            self._answer(command.number, answer)
        else:
            answer.add_done_callback(partial(self._answer_later, command.number))

    def _answer_later(self, number: int, future: Future[bytes]) -> None:
        error = future.exception()
        self._answer(number, b"" if error else future.result(), error)

    def _answer(
        self, number: int, payload: bytes = b"", error: BaseException | None = None
    ) -> None:
        info = None if error is None else typed(error).info()
        report = Report(kind=ReportKind.ANSWER, number=number, payload=payload, error=info)
        self._report(report, quiet=True)

    def _next(self) -> EngineCommand:
        try:
            self._channel.wait_readable()  # an idle rank 0 sends nothing
            return codec.decode(EngineCommand, self._channel.receive(self._message_limit()))
        except ChannelClosed as error:
            raise RankLost(f"rank 0 is gone: {error}", param="rank 0") from error

    def _message_limit(self) -> float:
        """When a message that starts now must have passed."""
        return time.monotonic() + self.invite.timeout_s

    def _report(self, report: Report, *, quiet: bool = False) -> None:
        try:
            self._channel.send(codec.encode(self._complete(report)), self._message_limit())
        except ChannelClosed as error:
            if not quiet:
                raise RankLost(f"rank 0 is gone: {error}", param="rank 0") from error

    def _complete(self, report: Report) -> Report:
        return structs.replace(
            report,
            begun=self._begun_steps,
            ended=self._ended_steps,
            collectives=self.tp.num_entered,
        )

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            alive = self._complete(Report(kind=ReportKind.ALIVE))
            try:
                self._channel.send(codec.encode(alive), self._message_limit())
            except ChannelClosed:
                return
