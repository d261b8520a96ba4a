"""One link with the threads that work on it: operations in order, the first failure ends them all.
Moves of a link without an order need no thread to begin them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

from kv_transfer.backends.base import BlockLink, End, Link, LinkBroken, LinkId
from kv_transfer.backends.pool_access import PoolAccess
from kv_transfer.data.rank_commands import PartResult
from kv_transfer.data.thread_setup import enter_thread
from protocol.errors import BatonError, Internal

#: Works on an open link with a staging buffer of at least the requested size.
Work = Callable[[Link, torch.Tensor], PartResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """How a BlockLink runs an operation: `begin` yields the Ends of its parts, `result` takes the
    sum of what they return. Moves of one `lane` end in order."""

    begin: Callable[[BlockLink], End]
    result: Callable[[int], PartResult]
    lane: int


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """One message waiting for its turn: `work` for a Link, a `move` for a BlockLink. `ended` is
    called once, in any thread, with what came of it."""

    access: PoolAccess
    ended: Callable[[PartResult | BatonError], None]
    num_bytes: int = 0
    work: Work | None = None
    move: Moving | None = None


_Queue = SimpleQueue[Callable[[], object] | None]


class Waiters:
    """A thread for each lane of a device, which waits for what runs there. Started on first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._queues: dict[int, _Queue] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def put(self, lane: int, wait: Callable[[], object]) -> None:
        """Call `wait` in the lane's thread, after those put before; at once when closed, or without
        a thread to be had: nobody else would ever call it."""
        with self._lock:
            queue = self._queues.get(lane)
            if queue is None and not self._closed:
                queue = self._start(lane)
            if queue is not None:
                queue.put(wait)
        if queue is None:
            wait()

    def _start(self, lane: int) -> _Queue | None:
        queue: _Queue = SimpleQueue()
        args, name = (queue, self._device), f"kv-wait-{lane}"
        thread = threading.Thread(target=_wait_all, args=args, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return None
        self._threads.append(thread)
        self._queues[lane] = queue
        return queue

    def close(self) -> None:
        """End the threads once nothing is left to wait for."""
        with self._lock:
            self._closed = True
            queues, self._queues = list(self._queues.values()), {}
            for queue in queues:
                queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for their end. A process that ends while one of them is in a call of torch aborts:
        the interpreter unwinds the thread through C++ that cannot be unwound."""
        limit = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _wait_all(queue: _Queue, device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # of a GPU that is broken: what runs there fails, too
        enter_thread(device)
    while (wait := queue.get()) is not None:
        wait()


class LinkThread:
    """Opens a link on its first operation and runs operations one after the other in a thread,
    which `start` starts.

    `submit` and `close` may be called from any thread and do not block. `predecessor` is the
    incarnation this one replaces and closes: nothing starts here while that one still touches the
    pool. Once a link without an order is open, `submit` begins moves itself and `waiters` end them;
    those of a link with one are ended by a thread of its own.
    """

    def __init__(
        self,
        link: LinkId,
        *,
        open_link: Callable[[], Link | BlockLink],
        device: torch.device,
        predecessor: LinkThread | None,
        waiters: Waiters,
    ) -> None:
        self.link = link
        self._open_link = open_link
        self._device = device
        self._predecessor = predecessor
        self._waiters = waiters
        self._own = Waiters(device)
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._open: Link | BlockLink | None = None
        self._unordered: BlockLink | None = None  # once open
        self._failure: BatonError | None = None
        self._pending: set[Operation] = set()
        self.revoked: list[PoolAccess] = []
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._thread = threading.Thread(target=self._run, name=f"kv-{link}", daemon=True)

    @property
    def broken(self) -> bool:
        """Whether it fails whatever it is given."""
        return self._failure is not None

    def start(self) -> None:
        """Start the thread. Raises LinkBroken when there is none to be had: then this link is
        broken."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.close(str(error))
            raise LinkBroken(f"link {self.link}: {error}") from error

    def submit(self, operation: Operation) -> None:
        """Queue an operation; it fails with LinkBroken when the link does."""
        with self._lock:
            failure = self._failure
            link = self._unordered
            if failure is None:
                self._pending.add(operation)
                if link is None:
                    self._queue.put(operation)
        if failure is not None:
            fail(operation, failure)
        elif link is not None:
            self._guarded(partial(self._begin, operation, link))

    def close(self, reason: str = "closed") -> None:
        """Break the link: queued operations fail now, a running one soon; none starts to touch the
        pool after this returns."""
        self._break(LinkBroken(f"link {self.link}: {reason}"))

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of its threads."""
        limit = time.monotonic() + timeout_s
        if self._thread.ident is not None:  # it has started
            self._thread.join(timeout_s)
        over = self._own.join(max(0.0, limit - time.monotonic()))
        return over and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if not self._guarded(partial(enter_thread, self._device)):
                return
            self.wait_for_predecessor()
            while (operation := self._queue.get()) is not None:
                if not self._guarded(partial(self._work, operation)):
                    return
        finally:  # give back the buffers now, not when the garbage collector comes
            self._staging = torch.empty(0, dtype=torch.uint8)
            with self._lock:
                self._open = self._unordered = None

    def _guarded(self, run: Callable[[], None]) -> bool:
        """Run a part of an operation; whatever it raises breaks the link."""
        try:
            run()
        except BatonError as error:
            self._break(error)
            return False
        except Exception as error:  # noqa: BLE001 - a thread's edge: whoever waits must learn of it
            self._break(Internal(f"link {self.link}: {type(error).__name__}: {error}"))
            return False
        return True

    def _work(self, operation: Operation) -> None:
        link = self._opened()
        if isinstance(link, BlockLink):
            self._begin(operation, link)
            return
        assert operation.work is not None
        self._complete(operation, operation.work(link, self._buffer(operation.num_bytes)))

    def _begin(self, operation: Operation, link: BlockLink) -> None:
        move = operation.move
        assert move is not None
        over = partial(self._guarded, partial(self._end, operation, move, move.begin(link)))
        if link.ordered:
            self._own.put(0, over)
        else:
            self._waiters.put(move.lane, over)

    def _end(self, operation: Operation, move: Moving, end: End) -> None:
        self._complete(operation, move.result(end()))

    def _complete(self, operation: Operation, result: PartResult) -> None:
        with self._lock:
            known = operation in self._pending
            self._pending.discard(operation)
        if known:
            operation.ended(result)

    def wait_for_predecessor(self) -> None:
        """Close earlier incarnations and wait until none touches the pool: at most one copy of one
        message."""
        predecessor = self._predecessor
        if predecessor is not None:
            predecessor.close("replaced")
            predecessor.wait_for_predecessor()
            for access in predecessor.revoked:
                access.revoke().result()
            self._predecessor = None

    def _opened(self) -> Link | BlockLink:
        self._raise_if_broken()
        if self._open is None:
            link = self._open_link()
            with self._lock:
                self._open = link
                if isinstance(link, BlockLink) and not link.ordered:
                    self._unordered = link
            try:
                self._raise_if_broken()
            except BatonError:
                link.close()
                raise
        return self._open

    def _raise_if_broken(self) -> None:
        with self._lock:
            failure = self._failure
        if failure is not None:
            raise failure

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._staging[:num_bytes]

    def _break(self, error: BatonError) -> None:
        _forget_frames(error)
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            pending, self._pending = self._pending, set()
            self._queue.put(None)
            self.revoked = [operation.access for operation in pending]
            link = self._open
        for access in self.revoked:
            access.revoke()
        if link is not None:
            link.close()
        self._own.close()
        for operation in pending:
            fail(operation, error)


def nothing(ended: Callable[[PartResult | BatonError], None]) -> Operation:
    """An operation that only needs the link to be open."""
    result = PartResult(num_bytes=0, checksum=0)
    move = Moving(begin=lambda _: lambda: 0, result=lambda _: result, lane=0)
    return Operation(access=PoolAccess(), ended=ended, work=lambda *_: result, move=move)


def _forget_frames(error: BaseException | None) -> None:
    """What broke a link is kept for those who come later; its frames would keep the buffers, those
    that still run and cannot be cleared, too."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def fail(operation: Operation, error: BatonError) -> None:
    """Report a failure, but only once the operation can touch the pool no more."""
    operation.access.revoke().add_done_callback(lambda _: operation.ended(error))
