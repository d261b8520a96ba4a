"""An NCCL communicator of two ranks whose every step has a deadline, the thread that enforces
deadlines, and the budget of staging buffers.

torch's process groups block without a limit while a communicator is built, and their watchdog ends
the whole process when one fails. This communicator is non-blocking: building it and posting on it
are polled against a deadline, and `abort` ends kernels that wait for a dead peer.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_NAME = "libnccl.so.2"  # the one that torch has loaded
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_ID_BYTES = 128
_UNSET = -(1 << 31)
_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21800  # the fields below are those of NCCL 2.18
_POLL_S = 20e-6  # posting takes 100; others need the interpreter's lock meanwhile


class NcclError(RuntimeError):
    """A call of NCCL failed, timed out or was aborted."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * _ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_NAME)
    except OSError as error:
        raise NcclError(f"no NCCL: {error}") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    to_handle, to_config = ctypes.POINTER(pointer), ctypes.POINTER(_Config)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetUniqueId.argtypes = (ctypes.POINTER(_UniqueId),)
    library.ncclCommInitRankConfig.argtypes = (to_handle, number, _UniqueId, number, to_config)
    library.ncclCommAbort.argtypes = (pointer,)
    return library


@cache
def _quick() -> ctypes.PyDLL:
    """Calls that return at once on a non-blocking communicator. They keep the interpreter's lock:
    getting it back from a busy event loop takes longer than the call."""
    library = ctypes.PyDLL(_NAME)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for call in (library.ncclSend, library.ncclRecv):
        call.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer)
    library.ncclCommGetAsyncError.argtypes = (pointer, ctypes.POINTER(ctypes.c_int))
    return library


def unique_id() -> bytes:
    """An id for a new communicator; the sender makes it and gives it to the receiver."""
    name = _UniqueId()
    _check("ncclGetUniqueId", _library().ncclGetUniqueId(ctypes.byref(name)))
    return bytes(name.data)


class Communicator:
    """One end of a pair. `send` and `recv` belong to one thread; `abort` may come from any.

    Streams are raw CUDA streams; the current device must be the one it was built under.
    """

    def __init__(self, name: bytes, rank: int, *, ctas: int, limit: float) -> None:
        self._lock = threading.Lock()
        self._peer = 1 - rank
        self._handle = ctypes.c_void_p()
        self._gone = False
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_MAGIC,
            version=_CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNSET,
            min_ctas=_UNSET,
            max_ctas=ctas,
            net_name=None,
            split_share=_UNSET,
        )
        raw = _UniqueId.from_buffer_copy(name)
        code = _library().ncclCommInitRankConfig(
            ctypes.byref(self._handle), 2, raw, rank, ctypes.byref(config)
        )
        self._settle("ncclCommInitRank", code, limit)

    def send(self, address: int, num_bytes: int, stream: int, limit: float) -> None:
        """Queue a send on a stream; raises NcclError when that is not done by `limit`
        (monotonic)."""
        self._post("ncclSend", address, num_bytes, stream, limit)

    def recv(self, address: int, num_bytes: int, stream: int, limit: float) -> None:
        self._post("ncclRecv", address, num_bytes, stream, limit)

    def abort(self) -> None:
        """End kernels that wait for the peer, and the communicator. Idempotent."""
        with self._lock:
            gone, self._gone = self._gone, True
            handle = self._handle
            if not gone and handle:
                _library().ncclCommAbort(handle)

    def _post(self, name: str, address: int, num_bytes: int, stream: int, limit: float) -> None:
        with self._lock:
            self._check_there(name)
            call = getattr(_quick(), name)
            code = call(address, num_bytes, _UINT8, self._peer, self._handle, stream)
        self._settle(name, code, limit)

    def _settle(self, name: str, code: int, limit: float) -> None:
        """Wait until NCCL's own thread has completed a call."""
        try:
            while code == _IN_PROGRESS:
                if time.monotonic() > limit:
                    raise NcclError(f"{name} timed out")
                time.sleep(_POLL_S)
                code = self._state(name)
            _check(name, code)
        except NcclError:
            self.abort()
            raise

    def _state(self, name: str) -> int:
        state = ctypes.c_int()
        with self._lock:
            self._check_there(name)
            code = _quick().ncclCommGetAsyncError(self._handle, ctypes.byref(state))
        _check("ncclCommGetAsyncError", code)
        return state.value

    def _check_there(self, name: str) -> None:
        if self._gone:
            raise NcclError(f"{name}: the communicator is gone")


class Watch:
    """Enforces deadlines of calls that take none: one thread for any number of guarded sections.
    Safe from any thread."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._order: list[tuple[float, int]] = []
        self._guarded: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @contextmanager
    def guard(self, limit: float, expired: Callable[[], None]) -> Iterator[None]:
        """Call `expired`, in the watch's thread, if the section still runs at `limit`
        (monotonic)."""
        with self._changed:
            number = next(self._numbers)
            self._guarded[number] = expired
            heapq.heappush(self._order, (limit, number))
            if self._order[0][1] == number:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._guarded.pop(number, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (expired := self._next()) is not None:
            expired()
            del expired  # its owner may be over, and hold buffers

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._closed:
                while self._order and self._order[0][1] not in self._guarded:
                    heapq.heappop(self._order)
                if not self._order:
                    self._changed.wait()
                    continue
                limit, number = self._order[0]
                left = limit - time.monotonic()
                if left <= 0:
                    heapq.heappop(self._order)
                    return self._guarded.pop(number)
                self._changed.wait(left)
        return None


class Staging:
    """A budget of `total` bytes, from which each link takes `count` buffers. Safe from any thread.

    Half of it is kept in equal shares for `links`; of the rest no link takes more than a quarter,
    so the first links get large buffers, and the last one still gets its share.
    """

    def __init__(self, total: int, *, largest: int, count: int, links: int = 1) -> None:
        self._left = total // count  # for one of the buffers of each link
        self._share = self._left // 2 // links
        self._links = links
        self._largest = largest
        self._lock = threading.Lock()

    def take(self, min_bytes: int) -> int:
        """Bytes of each of a link's buffers: at least `min_bytes`, even beyond the budget."""
        with self._lock:
            self._links -= 1
            spare = self._left - self._share * max(0, self._links)
            size = self._largest
            while size > min_bytes and (size > spare or size > max(self._share, spare // 4)):
                size //= 2
            size = max(size, min_bytes)
            self._left -= size
            return size

    def shrink(self, size: int) -> None:
        """Each buffer of a link became `size` bytes smaller."""
        with self._lock:
            self._left += size

    def give(self, size: int) -> None:
        """A link whose buffers have `size` bytes is gone."""
        with self._lock:
            self._links += 1
            self._left += size


def _check(name: str, code: int) -> None:
    if code != _SUCCESS:
        text = _library().ncclGetErrorString(code)
        raise NcclError(f"{name}: {(text or b'error').decode()}")
