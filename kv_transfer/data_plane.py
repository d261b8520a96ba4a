"""Executes transfer orders on one rank: moves messages between its KV pool and its peers' ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from kv_transfer.access import Access
from kv_transfer.backends.base import (
    Backend,
    BlockLink,
    BlockMove,
    End,
    Link,
    LinkBroken,
    LinkId,
)
from kv_transfer.backends.choice import build_backends
from kv_transfer.checksum import combine, message_checksum, place_checksum
from kv_transfer.config import ON_DEVICE, TransferConfig
from kv_transfer.links import LinkThread, Moving, Operation, Waiters, fail, nothing
from kv_transfer.orders import (
    CloseOrder,
    Listening,
    MoveOrder,
    OpenOrder,
    Order,
    Outcome,
    Part,
    PartResult,
    ReadyOrder,
    RevokeOrder,
)
from kv_transfer.outcomes import done, joined, when_over
from kv_transfer.store import BlockStore
from protocol import codec
from protocol.errors import BatonError, Internal, InvalidRequest

# sender epoch, receiver epoch, source rank, destination rank, backend
_Ends = tuple[int, int, int, int, str]
#: Writes to other ranks' pools that may be under way without waiting for each other: one that waits
#: for a step of the engine must not hold up the KV of a hand-off that is further.
_LANES = 4
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
        self._accesses: dict[_Handoff, set[Access]] = {}
        self._waiters = Waiters(store.device)

    @property
    def ways(self) -> set[str]:
        """The backends whose links are open."""
        with self._lock:
            return {ends[4] for ends in self._links}

    def execute(self, order: bytes) -> Future[bytes]:
        """Start one order (orders.Order); does not block. The future yields an orders.Outcome and
        never
        raises: errors are inside the outcome, so that they cross process borders typed."""
        answer: Future[bytes] = Future()
        answer.set_running_or_notify_cancel()  # whoever stops waiting does not stop the order
        try:
            outcome = self.submit(codec.decode(Order, order))
        except BatonError as error:
            outcome = done(Outcome(error=error.info()))
        outcome.add_done_callback(lambda ended: answer.set_result(_encoded(ended)))
        return answer

    def submit(self, order: Order) -> Future[Outcome]:
        """The same for callers in this process, without the codec."""
        try:
            return self._dispatch(order)
        except BatonError as error:
            return done(Outcome(error=error.info()))

    def close(self) -> None:
        """Break every link and stop listening; what is in flight fails."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close("data plane closed")
        for link in links:
            link.join(1.0)
        self._waiters.close()
        for backend in self._backends.values():
            backend.close()

    def _dispatch(self, order: Order) -> Future[Outcome]:
        if order.send is not None:
            return self._move(order.send, sending=True)
        if order.receive is not None:
            return self._move(order.receive, sending=False)
        if order.revoke is not None:
            return self._revoke(order.revoke)
        if order.open is not None:
            return self._open(order.open)
        if order.close is not None:
            return self._close_links(order.close)
        if order.ready is not None:
            return self._ready(order.ready)
        if order.listen is not None:
            return done(self._listen())
        raise InvalidRequest("empty transfer order", param="order")

    def _listen(self) -> Outcome:
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
        return Outcome(listening=tuple(found))

    def _ready(self, order: ReadyOrder) -> Future[Outcome]:
        marks = self._store.marks
        if marks is None:
            return done(Outcome())
        answer: Future[Outcome] = Future()
        answer.set_running_or_notify_cancel()

        def wait() -> None:
            try:
                marks.wait(order.after, order.layer)
            except Exception as error:  # noqa: BLE001 - a thread's edge: whoever waits must learn of it
                answer.set_result(Outcome(error=Internal(f"step {order.after}: {error}").info()))
            else:
                answer.set_result(Outcome())

        self._waiters.put(-1 - order.layer, wait)  # a lane for each layer: their order is given
        return answer

    # --- moving ---------------------------------------------------------------------------------

    def _move(self, order: MoveOrder, *, sending: bool) -> Future[Outcome]:
        operations = []
        backend = self._backend_of(order)
        for part in order.parts:
            peer = (part.peer_rank, part.endpoint)
            link, open_link = self._end_of(order, *peer, backend, sending=sending)
            operation = self._operation(order, part, link, backend.name, sending=sending)
            operations.append(operation)
            self._submit(operation, link, backend.name, open_link)
        return joined(operations)

    def _open(self, order: OpenOrder) -> Future[Outcome]:
        backend = self._backend_of(order)
        operations = []
        for rank, endpoint in order.peers:
            link, open_link = self._end_of(order, rank, endpoint, backend, sending=order.sending)
            operation = nothing(rank)
            operations.append(operation)
            self._submit(operation, link, backend.name, open_link)
        return joined(operations)

    def _submit(
        self,
        operation: Operation,
        link: LinkId,
        backend: str,
        open_link: Callable[[], Link | BlockLink],
    ) -> None:
        """Never raises: an order ends with the last of its operations, however one fares."""
        try:
            self._thread(link, backend, open_link).submit(operation)
        except LinkBroken as error:
            fail(operation, error)

    def _backend_of(self, order: MoveOrder | OpenOrder) -> Backend:
        name = order.backend or next(iter(self._backends))
        backend = self._backends.get(name)
        if backend is None:
            raise LinkBroken(f"this rank has no backend {name}", param="backend")
        return backend

    def _end_of(
        self,
        order: MoveOrder | OpenOrder,
        peer_rank: int,
        endpoint: str,
        backend: Backend,
        *,
        sending: bool,
    ) -> tuple[LinkId, Callable[[], Link | BlockLink]]:
        link = LinkId(
            sender_epoch=order.sender_epoch,
            receiver_epoch=order.receiver_epoch,
            source_rank=order.rank if sending else peer_rank,
            dest_rank=peer_rank if sending else order.rank,
            link=order.link,
        )
        limit = self._config.connect_timeout_s
        if sending:
            return link, lambda: backend.connect(link, endpoint, limit)
        return link, lambda: backend.accept(link, limit)

    def _thread(
        self, link: LinkId, backend: str, open_link: Callable[[], Link | BlockLink]
    ) -> LinkThread:
        pair = (link.sender_epoch, link.receiver_epoch, link.source_rank, link.dest_rank)
        ends = (*pair, backend)
        with self._lock:
            current = self._links.get(ends)
            if current is not None and current.link.link == link.link:
                return current
            if current is not None and current.link.link > link.link:
                raise LinkBroken(f"link {link} was replaced by {current.link}")
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

    def _operation(
        self, order: MoveOrder, part: Part, link: LinkId, backend: str, *, sending: bool
    ) -> Operation:
        access = Access()
        if backend in ON_DEVICE:  # stages by itself
            operation = self._block_operation(order, part, link, access, sending)
        else:
            operation = self._staged_operation(order, part, link, access, sending)
        self._track((order.receiver_epoch, order.generation), operation)
        return operation

    def _block_operation(
        self, order: MoveOrder, part: Part, name: LinkId, access: Access, sending: bool
    ) -> Operation:
        """Have the link move blocks between GPU pools."""
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
                source=name.source_rank,
                dest=name.dest_rank,
            )
            tokens = order.cells.num_tokens
            size = self._token_bytes * order.num_layers * tokens * part.num_heads
            checksum = combine([place, content])
            return PartResult(peer_rank=part.peer_rank, num_bytes=size, checksum=checksum)

        def begin(link: BlockLink) -> End:
            run = link.send_blocks if sending else link.recv_blocks
            return run(move, self._config.op_timeout_s)

        moving = Moving(begin=begin, result=result, lane=move.lane)
        return Operation(access=access, move=moving)

    def _staged_operation(
        self, order: MoveOrder, part: Part, name: LinkId, access: Access, sending: bool
    ) -> Operation:
        """Have the link's thread move a message through its staging buffer."""
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
                source=name.source_rank,
                dest=name.dest_rank,
            )
            size = staging.numel()
            return PartResult(peer_rank=part.peer_rank, num_bytes=size, checksum=checksum)

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
        return Operation(access=access, num_bytes=num_bytes, work=work)

    # --- revoking and closing -------------------------------------------------------------------

    def _track(self, handoff: _Handoff, operation: Operation) -> None:
        with self._lock:
            self._accesses.setdefault(handoff, set()).add(operation.access)

        def forget(_: Future[PartResult]) -> None:
            with self._lock:
                accesses = self._accesses.get(handoff, set())
                accesses.discard(operation.access)
                if not accesses:
                    self._accesses.pop(handoff, None)

        operation.result.add_done_callback(forget)

    def _revoke(self, order: RevokeOrder) -> Future[Outcome]:
        with self._lock:
            accesses = list(self._accesses.get((order.receiver_epoch, order.generation), ()))
        return when_over(accesses)

    def _close_links(self, order: CloseOrder) -> Future[Outcome]:
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
        return done(Outcome())


def _encoded(ended: Future[Outcome]) -> bytes:
    return codec.encode(ended.result())
