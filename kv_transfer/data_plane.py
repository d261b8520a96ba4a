"""Executes transfer orders on one rank: moves messages between its KV pool and its peers' ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from kv_transfer.access import Access
from kv_transfer.backends.base import Backend, Link, LinkBroken, LinkId
from kv_transfer.backends.gloo import GlooBackend
from kv_transfer.checksum import message_checksum
from kv_transfer.config import BackendName, TransferConfig
from kv_transfer.links import LinkThread, Operation, fail
from kv_transfer.orders import (
    CloseOrder,
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

_Ends = tuple[int, int, int, int]  # sender epoch, receiver epoch, source rank, destination rank
_Handoff = tuple[int, int]  # receiver epoch, generation


def build_backend(config: TransferConfig) -> Backend:
    """The backend that `config` names. Memory backends meet in a hub: build those by hand."""
    if config.backend is BackendName.GLOO:
        return GlooBackend(config.host)
    raise ValueError(f"backend {config.backend} needs to be passed to DataPlane")


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
        self._backend = backend or build_backend(config)
        self._lock = threading.Lock()
        self._links: dict[_Ends, LinkThread] = {}
        self._accesses: dict[_Handoff, set[Access]] = {}

    def execute(self, order: bytes) -> Future[bytes]:
        """Start one order (orders.Order); does not block. The future yields an orders.Outcome and
        never
        raises: errors are inside the outcome, so that they cross process borders typed."""
        answer: Future[bytes] = Future()
        answer.set_running_or_notify_cancel()  # whoever stops waiting does not stop the order
        try:
            outcome = self._dispatch(codec.decode(Order, order))
        except BatonError as error:
            answer.set_result(codec.encode(Outcome(error=error.info())))
            return answer
        outcome.add_done_callback(lambda done: answer.set_result(_encoded(done)))
        return answer

    def close(self) -> None:
        """Break every link and stop listening; what is in flight fails."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close("data plane closed")
        for link in links:
            link.join(1.0)
        self._backend.close()

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
            return _done(Outcome(endpoint=self._backend.listen()))
        raise InvalidRequest("empty transfer order", param="order")

    # --- moving ---------------------------------------------------------------------------------

    def _move(self, order: MoveOrder, *, sending: bool) -> Future[Outcome]:
        operations = []
        for part in order.parts:
            link, open_link = self._end_of(order, part, sending=sending)
            operation = self._operation(order, part, link, sending=sending)
            operations.append(operation)
            try:
                self._thread(link, open_link).submit(operation)
            except LinkBroken as error:
                fail(operation, error)
        return _joined(operations)

    def _end_of(
        self, order: MoveOrder, part: Part, *, sending: bool
    ) -> tuple[LinkId, Callable[[], Link]]:
        link = LinkId(
            sender_epoch=order.sender_epoch,
            receiver_epoch=order.receiver_epoch,
            source_rank=order.rank if sending else part.peer_rank,
            dest_rank=part.peer_rank if sending else order.rank,
            link=order.link,
        )
        limit = self._config.connect_timeout_s
        if sending:
            return link, lambda: self._backend.connect(link, part.endpoint, limit)
        return link, lambda: self._backend.accept(link, limit)

    def _thread(self, link: LinkId, open_link: Callable[[], Link]) -> LinkThread:
        ends = (link.sender_epoch, link.receiver_epoch, link.source_rank, link.dest_rank)
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

    def _operation(self, order: MoveOrder, part: Part, link: LinkId, *, sending: bool) -> Operation:
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
        work = partial(self._send if sending else self._receive, order, part, link, access, shape)
        operation = Operation(access=access, num_bytes=_num_bytes(shape, store.dtype), work=work)
        self._track((order.receiver_epoch, order.generation), operation)
        return operation

    def _send(
        self,
        order: MoveOrder,
        part: Part,
        name: LinkId,
        access: Access,
        shape: Sequence[int],
        link: Link,
        staging: torch.Tensor,
    ) -> PartResult:
        """Gather and send. A revoked or discarded message still goes out, with whatever the staging
        buffer holds: the receiver has posted for it, and skipping it would set the two out of
        step."""
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
        link: Link,
        staging: torch.Tensor,
    ) -> PartResult:
        """Receive and, if the hand-off is still current, scatter."""
        link.recv(staging, self._config.op_timeout_s)
        checksum = self._checksum(staging, order, name)
        with torch.inference_mode(), access.entered() as allowed:
            if allowed:
                layers, heads = _ranges(order, part)
                data = staging.view(self._store.dtype).view(*shape)
                self._store.scatter(order.blocks, layers, heads, data)
        return PartResult(peer_rank=part.peer_rank, num_bytes=staging.numel(), checksum=checksum)

    def _checksum(self, staging: torch.Tensor, order: MoveOrder, name: LinkId) -> int:
        return message_checksum(
            staging,
            self._config.checksum,
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
    future: Future[Outcome] = Future()
    future.set_result(outcome)
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
    joined: Future[Outcome] = Future()

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
    over: Future[Outcome] = Future()
    countdown = _Countdown(len(accesses), lambda: over.set_result(Outcome()))
    for access in accesses:
        access.revoke().add_done_callback(countdown)
    return over
