"""Executes transfer orders on one rank: moves messages between its KV pool and its peers' ranks."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future

import torch

from kv_transfer.backends.base import Backend, BlockLink, BlockMove, End, Link, LinkBroken, LinkId
from kv_transfer.backends.block_store import BlockStore
from kv_transfer.backends.choice import build_backends
from kv_transfer.backends.pool_access import PoolAccess
from kv_transfer.config import ON_DEVICE, ONE_SIDED, TransferConfig
from kv_transfer.data.link_threads import LinkThread, Moving, Operation, Waiters, fail, nothing
from kv_transfer.data.operation_results import Finish, Gathering, revoke
from kv_transfer.data.rank_commands import (
    CloseCommand,
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
from kv_transfer.plan.checksum import combine, message_checksum, place_checksum
from protocol import codec
from protocol.errors import BatonError, Internal, InvalidRequest

# sender epoch, receiver epoch, source rank, destination rank, backend
_Ends = tuple[int, int, int, int, str]
#: Writes to other ranks' pools that may be under way without waiting for each other: one that waits
#: for a step of the engine must not hold up the KV of a hand-off that is further.
_LANES = 4
_END_S = 1.0  # a thread that hangs does not hang its process
_Handoff = tuple[int, int]  # receiver epoch, generation


class DataPlane:
    """One rank's end of all links. `execute` and `close` may be called from any thread.

    Every link has a thread of its own, so a peer that hangs holds up nobody else. Orders that share
    a link run in the order in which they were given, on both sides: this is what keeps the two in
    step.
    """

    def __init__(
        self, store: BlockStore, config: TransferConfig, *, backend: Backend | None = None
    ) -> None:
        self._store = store
        self._config = config
        self._token_bytes = 2 * store.head_dim * store.dtype.itemsize  # of one layer and head
        backends = build_backends(store, config) if backend is None else [backend]
        self._backends = {each.name: each for each in backends}
        self._lock = threading.Lock()
        self._links: dict[_Ends, LinkThread] = {}
        self._accesses: dict[_Handoff, set[PoolAccess]] = {}
        self._waiters = Waiters(store.device)

    @property
    def ways(self) -> set[str]:
        """The backends whose links are open."""
        with self._lock:
            return {ends[4] for ends in self._links}

    def execute(self, order: bytes) -> Future[bytes]:
        """Start one order (orders.Order); does not block. The future yields an orders.Outcome and
        never raises: errors are inside the outcome, so that they cross process borders typed."""
        answer: Future[bytes] = Future()
        answer.set_running_or_notify_cancel()  # whoever stops waiting does not stop the order

        def finish(outcome: RankResult) -> None:
            answer.set_result(codec.encode(outcome))

        try:
            self.submit(codec.decode(RankCommand, order), finish)
        except BatonError as error:
            finish(RankResult(error=error.info()))
        return answer

    def submit(self, order: RankCommand, finish: Finish) -> None:
        """The same for callers in this process, without the codec: `finish` is called with the
        outcome, once, in any thread."""
        try:
            self._dispatch(order, finish)
        except BatonError as error:
            finish(RankResult(error=error.info()))

    def close(self) -> None:
        """Break every link and stop listening; what is in flight fails."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close("data plane closed")
        for link in links:
            link.join(_END_S)
        self._waiters.close()
        self._waiters.join(_END_S)
        for backend in self._backends.values():
            backend.close()

    def _dispatch(self, order: RankCommand, finish: Finish) -> None:
        if order.send is not None:
            self._move(order.send, finish, sending=True)
        elif order.receive is not None:
            self._move(order.receive, finish, sending=False)
        elif order.revoke is not None:
            self._revoke(order.revoke, finish)
        elif order.open is not None:
            self._open(order.open, finish)
        elif order.close is not None:
            self._close_links(order.close)
            finish(RankResult())
        elif order.ready is not None:
            self._ready(order.ready, finish)
        elif order.listen is not None:
            finish(self._listen())
        else:
            raise InvalidRequest("empty transfer order", param="order")

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

    def _ready(self, order: ReadyCommand, finish: Finish) -> None:
        marks = self._store.marks
        if marks is None:
            finish(RankResult())
            return

        def wait() -> None:
            try:
                marks.wait(order.after, order.layer)
            except Exception as error:  # noqa: BLE001 - a thread's edge: whoever waits must learn of it
                finish(RankResult(error=Internal(f"step {order.after}: {error}").info()))
            else:
                finish(RankResult())

        self._waiters.put(-1 - order.layer, wait)  # a lane for each layer: their order is given

    # --- moving ---------------------------------------------------------------------------------

    def _move(self, order: MoveCommand, finish: Finish, *, sending: bool) -> None:
        backend = self._backend_of(order)
        handoff = (order.receiver_epoch, order.generation)
        accesses = [PoolAccess() for _ in order.parts]

        def over(outcome: RankResult) -> None:
            self._forget(handoff, accesses)
            finish(outcome)

        self._track(handoff, accesses)
        ended = Gathering(len(accesses), over)
        device = backend.name in ON_DEVICE  # stages by itself
        make = self._block_operation if device else self._staged_operation
        for part, access in zip(order.parts, accesses, strict=True):
            operation = make(order, part, access, ended, sending)
            self._submit(operation, order, part.peer_rank, part.endpoint, backend, sending=sending)

    def _open(self, order: OpenCommand, finish: Finish) -> None:
        backend = self._backend_of(order)
        ended = Gathering(len(order.peers), finish)
        for rank, endpoint in order.peers:
            operation = nothing(ended)
            self._submit(operation, order, rank, endpoint, backend, sending=order.sending)

    def _backend_of(self, order: MoveCommand | OpenCommand) -> Backend:
        name = order.backend or next(iter(self._backends))
        backend = self._backends.get(name)
        if backend is None:
            raise LinkBroken(f"this rank has no backend {name}", param="backend")
        return backend

    def _submit(
        self,
        operation: Operation,
        order: MoveCommand | OpenCommand,
        peer_rank: int,
        endpoint: str,
        backend: Backend,
        *,
        sending: bool,
    ) -> None:
        """Never raises: an order ends with the last of its operations, however one fares."""
        source, dest = _ends(order, peer_rank, sending)
        ends = (order.sender_epoch, order.receiver_epoch, source, dest, backend.name)
        alone = not sending and backend.name in ONE_SIDED  # a link without another end to renew
        try:
            with self._lock:
                thread = self._links.get(ends)
                usable = thread is not None and not (alone and thread.broken)
                if thread is None or not usable or thread.link.link != order.link:
                    thread = self._replace(thread, ends, order.link, endpoint, backend, sending)
            thread.submit(operation)
        except LinkBroken as error:
            fail(operation, error)

    def _replace(
        self,
        current: LinkThread | None,
        ends: _Ends,
        number: int,
        endpoint: str,
        backend: Backend,
        sending: bool,
    ) -> LinkThread:
        """Another incarnation of a link, with the lock held."""
        link = LinkId(
            sender_epoch=ends[0],
            receiver_epoch=ends[1],
            source_rank=ends[2],
            dest_rank=ends[3],
            link=number,
        )
        if current is not None and current.link.link > number:
            raise LinkBroken(f"link {link} was replaced by {current.link}")
        limit = self._config.connect_timeout_s

        def open_link() -> Link | BlockLink:
            if sending:
                return backend.connect(link, endpoint, limit)
            return backend.accept(link, limit)

        thread = LinkThread(
            link,
            open_link=open_link,
            device=self._store.device,
            predecessor=current,
            waiters=self._waiters,
        )
        self._links[ends] = thread  # whether it starts or not: what follows must not start anew
        thread.start()
        return thread

    def _block_operation(
        self, order: MoveCommand, part: Part, access: PoolAccess, ended: Gathering, sending: bool
    ) -> Operation:
        """Have the link move blocks between GPU pools."""
        source, dest = _ends(order, part.peer_rank, sending)
        move = BlockMove(
            cells=order.cells,
            first_layer=order.first_layer,
            num_layers=order.num_layers,
            first_head=part.first_head,
            num_heads=part.num_heads,
            access=access,
            checksum=self._config.checksum_kind(order.backend),
            discard=order.discard,
            peer_cells=order.peer_cells,
            peer_first_head=part.peer_first_head,
            after=order.after,
            lane=order.generation % _LANES,
        )

        def result(content: int) -> PartResult:
            place = place_checksum(
                generation=order.generation,
                sequence=order.sequence,
                source=source,
                dest=dest,
            )
            tokens = order.cells.num_tokens
            size = self._token_bytes * order.num_layers * tokens * part.num_heads
            checksum = combine([place, content])
            return PartResult(num_bytes=size, checksum=checksum)

        def begin(link: BlockLink) -> End:
            run = link.send_blocks if sending else link.recv_blocks
            return run(move, self._config.op_timeout_s)

        moving = Moving(begin=begin, result=result, lane=move.lane)
        return Operation(access=access, ended=ended, move=moving)

    def _staged_operation(
        self, order: MoveCommand, part: Part, access: PoolAccess, ended: Gathering, sending: bool
    ) -> Operation:
        """Have the link's thread move a message through its staging buffer."""
        source, dest = _ends(order, part.peer_rank, sending)
        store, limit_s = self._store, self._config.op_timeout_s
        layers = range(order.first_layer, order.first_layer + order.num_layers)
        heads = range(part.first_head, part.first_head + part.num_heads)
        cells = order.cells
        shape = (len(layers), cells.count, 2, len(heads), cells.size, store.head_dim)

        def result(staging: torch.Tensor) -> PartResult:
            checksum = message_checksum(
                staging,
                self._config.checksum_kind(order.backend),
                generation=order.generation,
                sequence=order.sequence,
                source=source,
                dest=dest,
            )
            size = staging.numel()
            return PartResult(num_bytes=size, checksum=checksum)

        def send(link: Link, staging: torch.Tensor) -> PartResult:
            """A revoked or discarded message still goes out, with whatever the staging buffer
            holds: the receiver has posted for it, and skipping it would set the two out of step."""
            if order.after and store.marks is not None:  # rank 0 was asked; this may be another
                store.marks.wait(order.after, layers[-1])
            with torch.inference_mode(), access.entered() as allowed:
                if allowed and not order.discard:
                    store.gather(cells, layers, heads, out=staging.view(store.dtype).view(shape))
            sent = result(staging)
            link.send(staging, limit_s)
            return sent

        def receive(link: Link, staging: torch.Tensor) -> PartResult:
            link.recv(staging, limit_s)
            received = result(staging)
            with torch.inference_mode(), access.entered() as allowed:
                if allowed:  # the hand-off is still current
                    store.scatter(cells, layers, heads, staging.view(store.dtype).view(shape))
            return received

        num_bytes = math.prod(shape) * store.dtype.itemsize
        work = send if sending else receive
        return Operation(access=access, ended=ended, num_bytes=num_bytes, work=work)

    # --- revoking and closing -------------------------------------------------------------------

    def _track(self, handoff: _Handoff, accesses: list[PoolAccess]) -> None:
        with self._lock:
            self._accesses.setdefault(handoff, set()).update(accesses)

    def _forget(self, handoff: _Handoff, accesses: list[PoolAccess]) -> None:
        with self._lock:
            left = self._accesses[handoff]
            left.difference_update(accesses)
            if not left:
                del self._accesses[handoff]

    def _revoke(self, order: RevokeCommand, finish: Finish) -> None:
        with self._lock:
            accesses = list(self._accesses.get((order.receiver_epoch, order.generation), ()))
        revoke(accesses, finish)

    def _close_links(self, order: CloseCommand) -> None:
        pair = (order.sender_epoch, order.receiver_epoch)
        with self._lock:
            found = {
                ends: thread
                for ends, thread in self._links.items()
                if ends[:2] == pair and thread.link.link <= order.link
            }
            if order.forget:
                for ends in found:
                    del self._links[ends]
        for thread in found.values():
            thread.close("closed by its worker")


def _ends(order: MoveCommand | OpenCommand, peer_rank: int, sending: bool) -> tuple[int, int]:
    """The source's rank and the destination's."""
    return (order.rank, peer_rank) if sending else (peer_rank, order.rank)
