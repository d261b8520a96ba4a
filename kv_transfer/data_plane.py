"""Executes transfer orders on one rank: moves messages between its KV pool and its peers' ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from kv_transfer.access import Access
from kv_transfer.backends.base import Backend, BlockLink, BlockMove, Link, LinkBroken, LinkId
from kv_transfer.backends.choice import build_backends
from kv_transfer.checksum import combine, message_checksum, place_checksum
from kv_transfer.config import ON_DEVICE, ONE_SIDED, TransferConfig
from kv_transfer.links import LinkThread, Operation, Work, fail
from kv_transfer.orders import (
    CloseOrder,
    Listening,
    MoveOrder,
    Order,
    Outcome,
    Part,
    PartResult,
    RevokeOrder,
)
from kv_transfer.store import BlockStore
from protocol import codec
from protocol.errors import BatonError, Internal, InvalidRequest

# sender epoch, receiver epoch, source rank, destination rank, backend, number among its like
_Ends = tuple[int, int, int, int, str, int]
#: Threads for the links of one pair that writes by itself: with two, one piece is on the wire while
#: the next is prepared. Its pieces need no order; elsewhere both ends must keep the same.
_WRITERS = 2
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
        backends = build_backends(store, config) if backend is None else [backend]
        self._backends = {each.name: each for each in backends}
        self._lock = threading.Lock()
        self._links: dict[_Ends, LinkThread] = {}
        self._accesses: dict[_Handoff, set[Access]] = {}

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
            outcome = _done(Outcome(error=error.info()))
        outcome.add_done_callback(lambda done: answer.set_result(_encoded(done)))
        return answer

    def submit(self, order: Order) -> Future[Outcome]:
        """The same for callers in this process, without the codec."""
        try:
            return self._dispatch(order)
        except BatonError as error:
            return _done(Outcome(error=error.info()))

    def close(self) -> None:
        """Break every link and stop listening; what is in flight fails."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close("data plane closed")
        for link in links:
            link.join(1.0)
        for backend in self._backends.values():
            backend.close()

    def _dispatch(self, order: Order) -> Future[Outcome]:
        if order.send is not None:
            return self._move(order.send, sending=True)
        if order.receive is not None:
            return self._move(order.receive, sending=False)
        if order.revoke is not None:
            return self._revoke(order.revoke)
        if order.close is not None:
            return self._close_links(order.close)
        if order.listen is not None:
            return _done(self._listen())
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

    # --- moving ---------------------------------------------------------------------------------

    def _move(self, order: MoveOrder, *, sending: bool) -> Future[Outcome]:
        operations = []
        backend = self._backend_of(order)
        for part in order.parts:
            link, open_link = self._end_of(order, part, backend, sending=sending)
            operation = self._operation(order, part, link, backend.name, sending=sending)
            operations.append(operation)
            try:
                writer = order.sequence % _WRITERS if backend.name in ONE_SIDED else 0
                self._thread(link, (backend.name, writer), open_link).submit(operation)
            except LinkBroken as error:
                fail(operation, error)
        return _joined(operations)

    def _backend_of(self, order: MoveOrder) -> Backend:
        name = order.backend or next(iter(self._backends))
        backend = self._backends.get(name)
        if backend is None:
            raise LinkBroken(f"this rank has no backend {name}", param="backend")
        return backend

    def _end_of(
        self, order: MoveOrder, part: Part, backend: Backend, *, sending: bool
    ) -> tuple[LinkId, Callable[[], Link | BlockLink]]:
        link = LinkId(
            sender_epoch=order.sender_epoch,
            receiver_epoch=order.receiver_epoch,
            source_rank=order.rank if sending else part.peer_rank,
            dest_rank=part.peer_rank if sending else order.rank,
            link=order.link,
        )
        limit = self._config.connect_timeout_s
        if sending:
            return link, lambda: backend.connect(link, part.endpoint, limit)
        return link, lambda: backend.accept(link, limit)

    def _thread(
        self, link: LinkId, which: tuple[str, int], open_link: Callable[[], Link | BlockLink]
    ) -> LinkThread:
        pair = (link.sender_epoch, link.receiver_epoch, link.source_rank, link.dest_rank)
        ends = (*pair, *which)
        with self._lock:
            current = self._links.get(ends)
            if current is not None and current.link.link == link.link:
                return current
            if current is not None and current.link.link > link.link:
                raise LinkBroken(f"link {link} was replaced by {current.link}")
            thread = LinkThread(
                link, open_link=open_link, device=self._store.device, predecessor=current
            )
            self._links[ends] = thread
            return thread

    def _operation(
        self, order: MoveOrder, part: Part, link: LinkId, backend: str, *, sending: bool
    ) -> Operation:
        access = Access()
        store = self._store
        shape = (
            order.num_layers,
            len(order.blocks),
            2,
            part.num_heads,
            store.block_size,
            store.head_dim,
        )
        num_bytes = _num_bytes(shape, store.dtype)
        work: Work
        if backend in ON_DEVICE:  # stages by itself
            work = partial(self._move_blocks, order, part, link, access, num_bytes, sending)
            num_bytes = 0
        else:
            run = self._send if sending else self._receive
            work = partial(run, order, part, link, access, shape)
        operation = Operation(access=access, num_bytes=num_bytes, work=work)
        self._track((order.receiver_epoch, order.generation), operation)
        return operation

    def _send(
        self,
        order: MoveOrder,
        part: Part,
        name: LinkId,
        access: Access,
        shape: Sequence[int],
        link: Link | BlockLink,
        staging: torch.Tensor,
    ) -> PartResult:
        """Gather and send. A revoked or discarded message still goes out, with whatever the staging
        buffer holds: the receiver has posted for it, and skipping it would set the two out of
        step."""
        assert not isinstance(link, BlockLink)
        with torch.inference_mode(), access.entered() as allowed:
            if allowed and not order.discard:
                layers, heads = _ranges(order, part)
                out = staging.view(self._store.dtype).view(*shape)
                self._store.gather(order.blocks, layers, heads, out=out)
        checksum = self._checksum(staging, order, name)
        link.send(staging, self._config.op_timeout_s)
        return PartResult(peer_rank=part.peer_rank, num_bytes=staging.numel(), checksum=checksum)

    def _receive(
        self,
        order: MoveOrder,
        part: Part,
        name: LinkId,
        access: Access,
        shape: Sequence[int],
        link: Link | BlockLink,
        staging: torch.Tensor,
    ) -> PartResult:
        """Receive and, if the hand-off is still current, scatter."""
        assert not isinstance(link, BlockLink)
        link.recv(staging, self._config.op_timeout_s)
        checksum = self._checksum(staging, order, name)
        with torch.inference_mode(), access.entered() as allowed:
            if allowed:
                layers, heads = _ranges(order, part)
                data = staging.view(self._store.dtype).view(*shape)
                self._store.scatter(order.blocks, layers, heads, data)
        return PartResult(peer_rank=part.peer_rank, num_bytes=staging.numel(), checksum=checksum)

    def _move_blocks(
        self,
        order: MoveOrder,
        part: Part,
        name: LinkId,
        access: Access,
        num_bytes: int,
        sending: bool,
        link: Link | BlockLink,
        _: torch.Tensor,
    ) -> PartResult:
        """Have the link move blocks between GPU pools."""
        assert isinstance(link, BlockLink)
        move = BlockMove(
            blocks=order.blocks,
            first_layer=order.first_layer,
            num_layers=order.num_layers,
            first_head=part.first_head,
            num_heads=part.num_heads,
            access=access,
            checksum=self._config.checksum_kind(order.backend),
            discard=order.discard,
            peer_blocks=order.peer_blocks,
            peer_first_head=part.peer_first_head,
        )
        run = link.send_blocks if sending else link.recv_blocks
        content = run(move, self._config.op_timeout_s)
        place = place_checksum(
            generation=order.generation,
            sequence=order.sequence,
            source=name.source_rank,
            dest=name.dest_rank,
        )
        checksum = combine([place, content])
        return PartResult(peer_rank=part.peer_rank, num_bytes=num_bytes, checksum=checksum)

    def _checksum(self, staging: torch.Tensor, order: MoveOrder, name: LinkId) -> int:
        return message_checksum(
            staging,
            self._config.checksum_kind(order.backend),
            generation=order.generation,
            sequence=order.sequence,
            source=name.source_rank,
            dest=name.dest_rank,
        )

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
        return _when_over(accesses)

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
        return _done(Outcome())


def _ranges(order: MoveOrder, part: Part) -> tuple[range, range]:
    layers = range(order.first_layer, order.first_layer + order.num_layers)
    return layers, range(part.first_head, part.first_head + part.num_heads)


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


def _done(outcome: Outcome) -> Future[Outcome]:
    future = _running()
    future.set_result(outcome)
    return future


def _running() -> Future[Outcome]:
    """A future that cannot be cancelled: whoever stops waiting does not stop the order."""
    future: Future[Outcome] = Future()
    future.set_running_or_notify_cancel()
    return future


def _encoded(done: Future[Outcome]) -> bytes:
    return codec.encode(done.result())


class _Countdown:
    """Calls `finish` when `count` futures are done."""

    def __init__(self, count: int, finish: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._finish = finish
        if count == 0:
            finish()

    def __call__(self, _: Future[PartResult] | Future[None]) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._finish()


def _joined(operations: list[Operation]) -> Future[Outcome]:
    """The outcome of several messages: all results, or the first error once every one has ended."""
    joined = _running()

    def finish() -> None:
        errors = [e for e in (op.result.exception() for op in operations) if e is not None]
        if not errors:
            joined.set_result(Outcome(parts=tuple(op.result.result() for op in operations)))
            return
        first = errors[0]
        error = first if isinstance(first, BatonError) else Internal(str(first))
        joined.set_result(Outcome(error=error.info()))

    countdown = _Countdown(len(operations), finish)
    for operation in operations:
        operation.result.add_done_callback(countdown)
    return joined


def _when_over(accesses: list[Access]) -> Future[Outcome]:
    over = _running()
    countdown = _Countdown(len(accesses), lambda: over.set_result(Outcome()))
    for access in accesses:
        access.revoke().add_done_callback(countdown)
    return over
