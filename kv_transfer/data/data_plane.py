"""Executes transfer commands on one rank: moves messages between its KV pool and the ranks of peer
workers."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

from kv_transfer.backends.base import (
    Backend,
    BlockLink,
    BlockMove,
    BlockStore,
    LinkBroken,
    LinkId,
    PoolAccess,
)
from kv_transfer.backends.choice import build_backends
from kv_transfer.config import ONE_SIDED, TransferConfig
from kv_transfer.data.link_thread import LinkMessage, LinkThread, StagedLink
from kv_transfer.data.rank_commands import (
    CloseCommand,
    Finish,
    Listening,
    MoveCommand,
    OpenCommand,
    Part,
    PartResult,
    RankCommand,
    RankResult,
    ReadyCommand,
    RevokeCommand,
)
from kv_transfer.data.threads import SerialThreads
from kv_transfer.plan.checksum import place_checksum
from protocol import codec
from protocol.errors import BatonError, Internal, InvalidRequest
from protocol.kv_layout import DTYPE_BYTES, FP8_KV

#: CUDA streams for one-sided writes: one that waits for a step of the engine must not hold up the
#: KV of a hand-off that is further.
_NUM_STREAMS = 4
_JOIN_TIMEOUT_S = 1.0  # a thread that hangs does not hang its process


class _Ends(NamedTuple):
    """A link without its incarnation."""

    sender_epoch: int
    receiver_epoch: int
    source_rank: int
    dest_rank: int
    backend: str


class DataPlane:
    """One rank's end of all links. `execute` and `close` may be called from any thread.

    Every link has a thread of its own, so a peer that hangs holds up no other. Commands that share
    a link run in the order in which they were given, on both workers, which keeps the two in step.
    """

    def __init__(
        self, store: BlockStore, config: TransferConfig, *, backend: Backend | None = None
    ) -> None:
        self._store = store
        self._config = config
        backends = build_backends(store, config) if backend is None else [backend]
        self._backends = {each.name: each for each in backends}
        self._lock = threading.Lock()
        self._links: dict[_Ends, LinkThread] = {}
        self._accesses: dict[tuple[int, int], set[PoolAccess]] = {}  # receiver epoch, generation
        self._write_threads = SerialThreads("kv-write", store.device)  # one for each CUDA stream
        self._layer_threads = SerialThreads("kv-layer", store.device)  # one for each layer

    @property
    def open_backends(self) -> set[str]:
        with self._lock:
            return {ends.backend for ends in self._links}

    def execute(self, command: bytes) -> Future[bytes]:
        """Start an encoded RankCommand; does not block. The future yields an encoded RankResult and
        never raises: errors are inside the result, so that they cross process borders typed."""
        answer: Future[bytes] = Future()
        answer.set_running_or_notify_cancel()  # cancelling the wait does not stop the command

        def finish(result: RankResult) -> None:
            answer.set_result(codec.encode(result))

        try:
            self.submit(codec.decode(RankCommand, command), finish)
        except BatonError as error:
            finish(RankResult(error=error.info()))
        return answer

    def submit(self, command: RankCommand, finish: Finish) -> None:
        """The same for callers in this process, without the codec: `finish` is called with the
        result, once, in any thread."""
        try:
            self._dispatch(command, finish)
        except BatonError as error:
            finish(RankResult(error=error.info()))

    def close(self) -> None:
        """Break every link and stop listening; messages in flight fail."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close("data plane closed")
        for link in links:
            link.join(_JOIN_TIMEOUT_S)
        for threads in (self._write_threads, self._layer_threads):
            threads.close()
            threads.join(_JOIN_TIMEOUT_S)
        for backend in self._backends.values():
            backend.close()

    def _dispatch(self, command: RankCommand, finish: Finish) -> None:
        if command.send is not None:
            self._move(command.send, finish, sending=True)
        elif command.receive is not None:
            self._move(command.receive, finish, sending=False)
        elif command.revoke is not None:
            self._revoke(command.revoke, finish)
        elif command.open is not None:
            self._open(command.open, finish)
        elif command.close is not None:
            self._close_links(command.close)
            finish(RankResult())
        elif command.ready is not None:
            self._await_step(command.ready, finish)
        elif command.listen is not None:
            finish(self._listen())
        else:
            raise InvalidRequest("empty transfer command", param="command")

    def _listen(self) -> RankResult:
        """Every backend that this rank can be reached by; the error of the last when none."""
        found = []
        error: LinkBroken | None = None
        for name, backend in self._backends.items():
            try:
                found.append(Listening(backend=name, endpoint=backend.listen()))
            except LinkBroken as failure:
                error = failure
        if not found and error is not None:
            raise error
        return RankResult(listening=tuple(found))

    def _await_step(self, command: ReadyCommand, finish: Finish) -> None:
        marks = self._store.step_events
        if marks is None:
            finish(RankResult())
            return

        def wait() -> None:
            try:
                marks.wait(command.after, command.layer)
            except Exception as error:  # noqa: BLE001 - a thread's edge: the command must end
                finish(RankResult(error=Internal(f"step {command.after}: {error}").info()))
            else:
                finish(RankResult())

        self._layer_threads.put(command.layer, wait)  # the steps of one layer end in order

    # --- moving ---------------------------------------------------------------------------------

    def _move(self, command: MoveCommand, finish: Finish, *, sending: bool) -> None:
        backend = self._backend(command.backend)
        handoff = (command.receiver_epoch, command.generation)
        accesses = [PoolAccess() for _ in command.parts]

        def finish_move(result: RankResult) -> None:
            self._forget(handoff, accesses)
            finish(result)

        dtype = self._store.dtype.itemsize if not command.dtype else DTYPE_BYTES[command.dtype]
        row_bytes = 2 * self._store.head_dim * dtype * command.num_layers * command.cells.num_tokens
        with self._lock:
            self._accesses.setdefault(handoff, set()).update(accesses)
        results = _PartResults(len(accesses), finish_move)
        for part, access in zip(command.parts, accesses, strict=True):
            ends = _ends(command, part.peer_rank, backend, sending=sending)
            message = LinkMessage(
                done=results.add,
                move=self._block_move(command, part, access, ends),
                sending=sending,
                num_bytes=row_bytes * part.num_heads,
                timeout_s=self._config.op_timeout_s,
            )
            self._submit(message, ends, command.incarnation, part.endpoint, sending=sending)

    def _open(self, command: OpenCommand, finish: Finish) -> None:
        backend = self._backend(command.backend)
        results = _PartResults(len(command.peers), finish)
        for rank, endpoint in command.peers:
            ends = _ends(command, rank, backend, sending=command.sending)
            message = LinkMessage(done=results.add)
            self._submit(message, ends, command.incarnation, endpoint, sending=command.sending)

    def _backend(self, name: str) -> Backend:
        backend = self._backends.get(name or next(iter(self._backends)))
        if backend is None:
            raise LinkBroken(f"this rank has no backend {name}", param="backend")
        return backend

    def _block_move(
        self, command: MoveCommand, part: Part, access: PoolAccess, ends: _Ends
    ) -> BlockMove:
        return BlockMove(
            cells=command.cells,
            first_layer=command.first_layer,
            num_layers=command.num_layers,
            first_head=part.first_head,
            num_heads=part.num_heads,
            access=access,
            checksum=self._config.checksum_kind(command.backend),
            place=place_checksum(
                generation=command.generation,
                index=command.index,
                source=ends.source_rank,
                dest=ends.dest_rank,
            ),
            discard=command.discard,
            peer_cells=command.peer_cells,
            peer_first_head=part.peer_first_head,
            coded=command.dtype == FP8_KV,
            after=command.after,
            stream_index=command.generation % _NUM_STREAMS,
        )

    def _submit(
        self, message: LinkMessage, ends: _Ends, incarnation: int, endpoint: str, *, sending: bool
    ) -> None:
        """Never raises: a command ends with the last of its messages, even if one cannot begin."""
        # A one-sided receiver has no peer that would ask for another incarnation.
        alone = not sending and ends.backend in ONE_SIDED
        try:
            with self._lock:
                link = self._links.get(ends)
                usable = link is not None and not (alone and link.broken)
                if link is None or not usable or link.link.incarnation != incarnation:
                    link = self._replace(link, ends, incarnation, endpoint, sending=sending)
            link.submit(message)
        except LinkBroken as error:
            message.fail(error)

    def _replace(
        self,
        current: LinkThread | None,
        ends: _Ends,
        incarnation: int,
        endpoint: str,
        *,
        sending: bool,
    ) -> LinkThread:
        """Another incarnation of a link, with the lock held."""
        link = LinkId(
            sender_epoch=ends.sender_epoch,
            receiver_epoch=ends.receiver_epoch,
            source_rank=ends.source_rank,
            dest_rank=ends.dest_rank,
            incarnation=incarnation,
        )
        if current is not None and current.link.incarnation > incarnation:
            raise LinkBroken(f"link {link} was replaced by {current.link}")
        backend, timeout_s = self._backends[ends.backend], self._config.connect_timeout_s

        def open_link() -> BlockLink:
            if sending:
                opened = backend.connect(link, endpoint, timeout_s)
            else:
                opened = backend.accept(link, timeout_s)
            return opened if isinstance(opened, BlockLink) else StagedLink(opened, self._store)

        thread = LinkThread(
            link,
            open_link=open_link,
            device=self._store.device,
            predecessor=current,
            completion=self._write_threads,
        )
        self._links[ends] = thread  # even if it cannot start: what follows must not start anew
        thread.start()
        return thread

    # --- revoking and closing -------------------------------------------------------------------

    def _forget(self, handoff: tuple[int, int], accesses: Iterable[PoolAccess]) -> None:
        with self._lock:
            left = self._accesses[handoff]
            left.difference_update(accesses)
            if not left:
                del self._accesses[handoff]

    def _revoke(self, command: RevokeCommand, finish: Finish) -> None:
        with self._lock:
            accesses = list(self._accesses.get((command.receiver_epoch, command.generation), ()))
        results = _PartResults(len(accesses), finish)
        for access in accesses:
            access.revoke().add_done_callback(lambda _: results.add(None))

    def _close_links(self, command: CloseCommand) -> None:
        pair = (command.sender_epoch, command.receiver_epoch)
        with self._lock:
            found = {
                ends: thread
                for ends, thread in self._links.items()
                if ends[:2] == pair and thread.link.incarnation <= command.incarnation
            }
            if command.forget:
                for ends in found:
                    del self._links[ends]
        for thread in found.values():
            thread.close("closed by its worker")


class _PartResults:
    """Calls `finish` once each of `count` parts has ended: with all results, or the first error.
    Safe from any thread."""

    def __init__(self, count: int, finish: Finish) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._finish = finish
        self._parts: list[PartResult] = []
        self._error: BatonError | None = None
        if count == 0:
            finish(RankResult())

    def add(self, result: PartResult | BatonError | None) -> None:
        with self._lock:
            if isinstance(result, PartResult):
                self._parts.append(result)
            elif self._error is None:
                self._error = result
            self._left -= 1
            last = self._left == 0
        if last:
            error = None if self._error is None else self._error.info()
            self._finish(RankResult(error=error, parts=tuple(self._parts)))


def _ends(
    command: MoveCommand | OpenCommand, peer_rank: int, backend: Backend, *, sending: bool
) -> _Ends:
    source, dest = (command.rank, peer_rank) if sending else (peer_rank, command.rank)
    return _Ends(command.sender_epoch, command.receiver_epoch, source, dest, backend.name)
