"""Limits for calls of Ray that have none: one that hangs would be waited for without an end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from protocol.errors import Unavailable

T = TypeVar("T")
#: For what Ray answers in milliseconds unless it hangs.
ANSWER_S = 30.0
_MOMENT_S = 5.0


def within(limit_s: float, what: str, work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread of its own. Raises Unavailable, saying that `what`,
    when it takes longer than `limit_s`; nobody waits for it then. Ctrl-C leaves the work a moment:
    what Ray does aborts the process if Ray is left meanwhile."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="within", daemon=True).start()
    try:
        return done.result(limit_s)
    except TimeoutError:
        if done.done():  # it was the work's own, or came at the same moment
            return done.result()
        raise Unavailable(f"{what} within {limit_s:.0f} s") from None
    except KeyboardInterrupt:
        wait([done], timeout=min(limit_s, _MOMENT_S))
        raise
