"""One incarnation of a link, and the thread that moves its messages; blocks over links that carry
bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock

import torch

from kv_transfer.backends.base import (
    BlockLink,
    BlockMove,
    BlockStore,
    End,
    Link,
    LinkBroken,
    LinkId,
    LinkMode,
    PoolAccess,
)
from kv_transfer.data.rank_commands import PartResult
from kv_transfer.data.threads import SerialThread, SerialThreads
from kv_transfer.plan.checksum import combine, content_checksum
from kv_transfer.plan.states import LINK_TRANSITIONS, LinkState, advance
from protocol.errors import BatonError, Internal


@dataclass(slots=True, kw_only=True, eq=False)
class LinkMessage:
    """One message of a piece. Without a `move` the link is only opened for it. `done` is called
    once, in any thread, with the result."""

    done: Callable[[PartResult | BatonError], None]
    move: BlockMove | None = None
    sending: bool = True
    num_bytes: int = 0
    timeout_s: float = 0.0

    def begin(self, link: BlockLink) -> End:
        assert self.move is not None
        run = link.send_blocks if self.sending else link.recv_blocks
        return run(self.move, self.timeout_s)

    def result(self, checksum: int) -> PartResult:
        assert self.move is not None
        checksum = combine([self.move.place, checksum])
        return PartResult(num_bytes=self.num_bytes, checksum=checksum)

    def fail(self, error: BatonError) -> None:
        """Report a failure, but only once the message cannot touch the pool any more."""
        if self.move is None:
            self.done(error)
        else:
            self.move.access.revoke().add_done_callback(lambda _: self.done(error))


class LinkThread:
    """Opens a link on its first message, then moves messages in order. The first failure breaks the
    link and fails all of them.

    `submit` and `close` may be called from any thread and do not block. `predecessor` is the
    incarnation that this one replaces and closes: no message starts here while one of that still
    touches the pool. An UNORDERED link, once open, begins messages in the thread that submits them,
    and `completion` threads, shared by all such links, end them.
    """

    def __init__(
        self,
        link: LinkId,
        *,
        open_link: Callable[[], BlockLink],
        device: torch.device,
        predecessor: LinkThread | None,
        completion: SerialThreads,
    ) -> None:
        self.link = link
        self._open_link = open_link
        self._predecessor = predecessor
        self._thread = SerialThread(f"kv-{link}", device)
        self._own_completion = SerialThreads(f"kv-done-{link}", device)  # of a PIPELINED link
        self._completion = completion
        self._lock = Lock()
        self._state = LinkState.OPENING
        self._open: BlockLink | None = None
        self._failure: BatonError | None = None  # of a BROKEN link
        self._pending: set[LinkMessage] = set()
        self.revoked: list[PoolAccess] = []  # of messages that were pending when it broke

    @property
    def broken(self) -> bool:
        return self._state is LinkState.BROKEN

    def start(self) -> None:
        """Start the thread. Raises LinkBroken when none can be started: then this link is
        broken."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.close(str(error))
            raise LinkBroken(f"link {self.link}: {error}") from error
        self._thread.put(partial(self._guarded, self._prepare))

    def submit(self, message: LinkMessage) -> None:
        """Queue a message; it fails with LinkBroken when the link does."""
        with self._lock:
            failure, link = self._failure, self._open
            if link is not None and link.mode is not LinkMode.UNORDERED:
                link = None
            if failure is None:
                self._pending.add(message)
                if link is None:
                    self._thread.put(partial(self._guarded, partial(self._move, message)))
        if failure is not None:
            message.fail(failure)
        elif link is not None:
            self._guarded(partial(self._begin, message, link))

    def close(self, reason: str = "closed") -> None:
        """Break the link: queued messages fail now, a running one soon; none starts to touch the
        pool after this returns."""
        self._break(LinkBroken(f"link {self.link}: {reason}"))

    def join(self, timeout_s: float) -> bool:
        limit = time.monotonic() + timeout_s
        ended = self._thread.join(timeout_s)
        return self._own_completion.join(limit - time.monotonic()) and ended

    def stop_predecessor(self) -> None:
        """Close earlier incarnations and wait until none touches the pool: at most one copy of one
        message."""
        predecessor = self._predecessor
        if predecessor is not None:
            predecessor.close("replaced")
            predecessor.stop_predecessor()
            for access in predecessor.revoked:
                access.revoke().result()
            self._predecessor = None  # only now: a successor that asks meanwhile waits, too

    def _prepare(self) -> None:
        self._thread.check_device()
        self.stop_predecessor()

    def _guarded(self, run: Callable[[], None]) -> None:
        """Run a part of a message; an exception breaks the link."""
        try:
            run()
        except BatonError as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the waiting message must fail
            self._break(Internal(f"link {self.link}: {type(error).__name__}: {error}"))

    def _move(self, message: LinkMessage) -> None:
        self._begin(message, self._opened())

    def _opened(self) -> BlockLink:
        self._raise_if_broken()
        if self._open is not None:
            return self._open
        link = self._open_link()
        with self._lock:
            if self._state is LinkState.OPENING:
                self._state = advance(LINK_TRANSITIONS, self._state, LinkState.OPEN)
                self._open = link
        if self._open is None:  # closed meanwhile
            link.close()
            self._raise_if_broken()
        return link

    def _begin(self, message: LinkMessage, link: BlockLink) -> None:
        if message.move is None:
            self._complete(message, PartResult(num_bytes=0, checksum=0))
            return
        end = partial(self._guarded, partial(self._end, message, message.begin(link)))
        if link.mode is LinkMode.BLOCKING:
            end()
        elif link.mode is LinkMode.PIPELINED:
            self._own_completion.put(0, end)
        else:
            self._completion.put(message.move.stream_index, end)

    def _end(self, message: LinkMessage, end: End) -> None:
        self._complete(message, message.result(end()))

    def _complete(self, message: LinkMessage, result: PartResult) -> None:
        with self._lock:
            pending = message in self._pending
            self._pending.discard(message)
        if pending:
            message.done(result)

    def _raise_if_broken(self) -> None:
        with self._lock:
            failure = self._failure
        if failure is not None:
            raise failure

    def _break(self, error: BatonError) -> None:
        _drop_frames(error)
        with self._lock:
            if self._state is LinkState.BROKEN:
                return
            self._state = advance(LINK_TRANSITIONS, self._state, LinkState.BROKEN)
            self._failure = error
            pending, self._pending = self._pending, set()
            link, self._open = self._open, None
            self.revoked = [each.move.access for each in pending if each.move is not None]
        for access in self.revoked:
            access.revoke()
        self._thread.close()
        self._own_completion.close()
        if link is not None:
            link.close()
        for message in pending:
            message.fail(error)


def _drop_frames(error: BaseException | None) -> None:
    """The error that broke a link is kept for later messages; its frames would keep buffers."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class StagedLink:
    """A BlockLink over a Link: gathers a message out of the pool and sends it, or receives it and
    scatters it into the pool."""

    mode = LinkMode.BLOCKING

    def __init__(self, link: Link, store: BlockStore) -> None:
        self._link = link
        self._store = store
        self._staging = torch.empty(0, dtype=torch.uint8, device=store.device)

    def send_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """A revoked or discarded message is sent all the same, with whatever the staging buffer
        holds: the receiver has posted for it, and skipping it would set the two out of step."""
        layers, heads, staging, rows = self._slice(move)
        marks = self._store.step_events
        if move.after and marks is not None:  # rank 0 has waited for its own step; wait for ours
            marks.wait(move.after, layers[-1])
        with torch.inference_mode(), move.access.entered() as allowed:
            if allowed and not move.discard:
                if self._converts(move):
                    rows.copy_(_codes(self._store.gather(move.cells, layers, heads)))
                else:
                    self._store.gather(move.cells, layers, heads, out=rows)
        checksum = content_checksum(staging, move.checksum, move.place)
        self._link.send(staging, timeout_s)
        return lambda: checksum

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """A revoked message is received all the same, and dropped."""
        layers, heads, staging, rows = self._slice(move)
        self._link.recv(staging, timeout_s)
        checksum = content_checksum(staging, move.checksum, move.place)
        with torch.inference_mode(), move.access.entered() as allowed:
            if allowed:
                data = _numbers(rows, self._store.dtype) if self._converts(move) else rows
                self._store.scatter(move.cells, layers, heads, data)
        return lambda: checksum

    def close(self) -> None:
        self._link.close()

    def _converts(self, move: BlockMove) -> bool:
        return move.coded and self._store.dtype is not torch.uint8

    def _slice(self, move: BlockMove) -> tuple[range, range, torch.Tensor, torch.Tensor]:
        """Layers and heads of a move, the staging buffer as bytes and shaped as the pool's rows."""
        dtype = torch.uint8 if move.coded else self._store.dtype
        store, cells = self._store, move.cells
        layers = range(move.first_layer, move.first_layer + move.num_layers)
        heads = range(move.first_head, move.first_head + move.num_heads)
        shape = (len(layers), cells.count, 2, len(heads), cells.size, store.head_dim)
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=store.device)
        staging = self._staging[:num_bytes]
        return layers, heads, staging, staging.view(dtype).view(shape)


def _codes(values: torch.Tensor) -> torch.Tensor:
    """The e4m3 codes of numbers, as an engine with a pool of codes writes them: at most 448."""
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def _numbers(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).to(dtype)
