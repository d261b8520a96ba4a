"""Links, messages and time under the test's control, around a sender and a receiver.

Control messages stay in the network until the test delivers, loses, repeats or delays them; KV
stays on links until the test moves it. Time advances only when the test says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from kv_transfer.backends.base import LinkBroken
from kv_transfer.backends.host import host_id
from kv_transfer.data.rank_commands import (
    CloseCommand,
    Finish,
    Listening,
    MoveCommand,
    Part,
    PartResult,
    RankCommand,
    RankResult,
    RevokeCommand,
)
from kv_transfer.plan.checksum import combine, place_checksum
from protocol import codec
from protocol.errors import BatonError, DeadlineExceeded, Unavailable
from rpc import methods
from tests.support.transfer import reply_of


class SimWorker(Protocol):
    """A worker's pool: a dictionary, so that every read and write can be checked."""

    def gather(self, op: Op) -> list[Cell]: ...

    def scatter(self, op: Op, cells: list[Cell]) -> None: ...
    def write(self, op: Op, cells: list[Cell]) -> None: ...


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the test's: to be turned by binary fractions. A loop rings a
    timer that is due within its clock's resolution, and time that stands still just before it would
    have it ring for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run until nothing is ready any more."""

        async def idle() -> None:
            calm = 0
            while calm < 3:
                await asyncio.sleep(0)
                calm = 0 if self._ready else calm + 1  # type: ignore[attr-defined]

        self.run_until_complete(idle())

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine and run until nothing is ready; it may be unfinished."""
        task = self.create_task(work)
        self.settle()
        return task


# --- control messages -----------------------------------------------------------------------------


@dataclass(eq=False)
class Letter:
    """One control call on its way. A ghost is a copy whose caller has stopped waiting."""

    address: str
    method: Any
    data: bytes
    reply: asyncio.Future[Any] | None


class Network:
    """The letters on their way, and the handlers they go to."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.handlers: dict[str, dict[Any, Callable[[Any], Any]]] = {}
        self.letters: list[Letter] = []

    def get(self, address: str) -> _Caller:
        return _Caller(self, address)

    def next(self) -> list[Letter]:
        """Those that may come next: without a fault, announcements of pieces keep their order."""
        pieces = [each for each in self.letters if each.method is methods.PIECE]
        return [each for each in self.letters if each not in pieces[1:]]

    def deliver(self, letter: Letter) -> None:
        """The peer gets it; the caller gets the reply when there is one."""
        self.letters.remove(letter)
        self._loop.run(self._handle(letter))

    def repeat(self, letter: Letter) -> None:
        """The peer gets it now, and once more later."""
        self.letters.append(Letter(letter.address, letter.method, letter.data, None))
        self.deliver(letter)

    def lose(self, letter: Letter) -> None:
        self.letters.remove(letter)
        self._give_up(letter, DeadlineExceeded("lost"))
        self._loop.settle()

    def refuse(self, letter: Letter) -> None:
        """Fail it as if no process listened at its address."""
        self.letters.remove(letter)
        self._give_up(letter, Unavailable("connection refused", param="address"))
        self._loop.settle()

    def delay(self, letter: Letter) -> None:
        """The caller stops waiting; the peer will get it later."""
        if letter.reply is None:
            return
        self.letters.append(Letter(letter.address, letter.method, letter.data, None))
        self.lose(letter)

    def lose_reply(self, letter: Letter) -> None:
        """The peer gets it, the caller does not learn."""
        ghost = Letter(letter.address, letter.method, letter.data, None)
        self.letters.append(ghost)
        self.deliver(ghost)
        self.lose(letter)

    def _give_up(self, letter: Letter, error: BatonError) -> None:
        if letter.reply is not None and not letter.reply.done():
            letter.reply.set_exception(error)

    async def _handle(self, letter: Letter) -> None:
        request = codec.decode(letter.method.request, letter.data)
        try:
            reply = await reply_of(self.handlers[letter.address][letter.method], request)
        except BatonError as error:
            if letter.reply is not None and not letter.reply.done():
                letter.reply.set_exception(error.info().to_error())
        else:
            if letter.reply is not None and not letter.reply.done():
                letter.reply.set_result(reply)


class _Caller:
    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        letter = Letter(self._address, method, codec.encode(request), reply)
        self._network.letters.append(letter)
        return await reply


# --- data -----------------------------------------------------------------------------------------

Cell = tuple[str, int, int, int]  # key, index, layer, head: what a slot of KV should hold


@dataclass(eq=False)
class Op:
    """One message that one rank has queued on a link."""

    command: MoveCommand
    part: Part
    worker: SimWorker
    done: asyncio.Future[PartResult]
    target: SimWorker | None = None  # whose blocks a one-sided message writes
    revoked: bool = False


@dataclass(eq=False)
class Wire:
    """One link: what is queued at either end and what is on the way."""

    name: tuple[int, int, int, int, int]
    sends: deque[Op] = field(default_factory=deque)
    receives: deque[Op] = field(default_factory=deque)
    flying: deque[tuple[list[Cell], int]] = field(default_factory=deque)
    broken: bool = False


class Fabric:
    """All links, and the rule that a newer incarnation voids an older one."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.wires: dict[tuple[int, int, int, int, int], Wire] = {}

    def wire(self, name: tuple[int, int, int, int, int]) -> Wire:
        for other in list(self.wires.values()):
            if other.name[:4] == name[:4] and other.name[4] < name[4]:
                self.snap(other)
        return self.wires.setdefault(name, Wire(name))

    def queue(self, op: Op, name: tuple[int, int, int, int, int], *, sending: bool) -> None:
        wire = self.wire(name)
        newest = max(n[4] for n in self.wires if n[:4] == name[:4])
        if wire.broken or newest > name[4]:
            op.done.set_exception(LinkBroken("broken"))
            return
        (wire.sends if sending else wire.receives).append(op)

    def can_send(self) -> list[Wire]:
        return [w for w in self.wires.values() if w.sends]

    def can_receive(self) -> list[Wire]:
        return [w for w in self.wires.values() if w.receives and w.flying]

    def send(self, wire: Wire) -> None:
        """The sender's head message leaves."""
        op = wire.sends.popleft()
        cells: list[Cell] = []
        if not op.revoked and not op.command.discard:
            cells = op.worker.gather(op)
        checksum = _checksum(cells, op, wire)
        size = _size(op)
        if op.target is None:
            wire.flying.append((cells, size))
        elif cells:
            op.target.write(op, cells)
        op.done.set_result(PartResult(num_bytes=size, checksum=checksum))
        self._loop.settle()

    def receive(self, wire: Wire) -> None:
        """The message that is first on the way arrives."""
        op = wire.receives.popleft()
        cells, size = wire.flying.popleft()
        assert size == _size(op), "the two ends are out of step"
        if not op.revoked:
            op.worker.scatter(op, cells)
        checksum = _checksum(cells, op, wire)
        op.done.set_result(PartResult(num_bytes=size, checksum=checksum))
        self._loop.settle()

    def snap(self, wire: Wire) -> None:
        """The link breaks: everything on it fails, on both sides."""
        wire.broken = True
        for op in (*wire.sends, *wire.receives):
            op.done.set_exception(LinkBroken("snapped"))
        wire.sends.clear()
        wire.receives.clear()
        wire.flying.clear()

    def revoke(self, worker: SimWorker, command: RevokeCommand) -> None:
        for wire in self.wires.values():
            for op in (*wire.sends, *wire.receives):
                named = (op.command.receiver_epoch, op.command.generation)
                if op.worker is worker and named == (command.receiver_epoch, command.generation):
                    op.revoked = True

    def close(self, command: CloseCommand) -> None:
        for wire in list(self.wires.values()):
            pair = (command.sender_epoch, command.receiver_epoch)
            if wire.name[:2] == pair and wire.name[4] <= command.incarnation:
                self.snap(wire)


def _size(op: Op) -> int:
    return op.command.cells.num_tokens * op.command.num_layers * op.part.num_heads


def _checksum(cells: list[Cell], op: Op, wire: Wire) -> int:
    place = (op.command.generation, op.command.index, *wire.name[2:4])
    if op.target is not None:
        generation, index, source, dest = place
        return place_checksum(generation=generation, index=index, source=source, dest=dest)
    return combine([abs(hash((place, tuple(cells))))])


class SimRanks:
    """A RankChannel into the fabric. With a target, what it sends is written there directly."""

    def __init__(self, fabric: Fabric, worker: SimWorker, target: SimWorker | None = None) -> None:
        self._fabric = fabric
        self._worker = worker
        self._target = target

    def submit(self, rank: int, command: RankCommand, finish: Finish) -> None:
        running = self._run(rank, codec.decode(RankCommand, command.encode()))

        def ended(task: asyncio.Task[RankResult]) -> None:
            finish(codec.decode(RankResult, codec.encode(task.result())))

        asyncio.get_running_loop().create_task(running).add_done_callback(ended)

    async def _run(self, rank: int, command: RankCommand) -> RankResult:
        if command.listen is not None:
            way = Listening(backend="tcp", endpoint=f"sim-{rank}")
            if self._target is not None:
                way = Listening(backend="cuda_ipc", endpoint=f"{host_id()}|{rank}")
            return RankResult(listening=(way,))
        if command.revoke is not None:
            self._fabric.revoke(self._worker, command.revoke)
            return RankResult()
        if command.close is not None:
            self._fabric.close(command.close)
            return RankResult()
        move = command.send or command.receive
        assert move is not None
        assert move.rank == rank
        ops = [self._queue(move, part, sending=command.send is not None) for part in move.parts]
        results = await asyncio.gather(*(op.done for op in ops), return_exceptions=True)
        for result in results:
            if isinstance(result, BatonError):
                return RankResult(error=result.info())
        return RankResult(parts=tuple(r for r in results if isinstance(r, PartResult)))

    def _queue(self, command: MoveCommand, part: Part, *, sending: bool) -> Op:
        done: asyncio.Future[PartResult] = asyncio.get_running_loop().create_future()
        op = Op(command=command, part=part, worker=self._worker, done=done, target=self._target)
        source, dest = command.rank, part.peer_rank
        if not sending:
            source, dest = dest, source
        name = (command.sender_epoch, command.receiver_epoch, source, dest, command.incarnation)
        self._fabric.queue(op, name, sending=sending)
        return op
