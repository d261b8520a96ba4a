"""Time limits for calls into Ray, some of which block forever when Ray hangs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from concurrency.threads import start_thread
from protocol.errors import Unavailable

T = TypeVar("T")
#: For calls that Ray answers in milliseconds unless it hangs.
ANSWER_S = 30.0
_INTERRUPT_GRACE_S = 5.0


def call_with_timeout(timeout_s: float, failure: str, call: Callable[[], T]) -> T:
    """The result of `call`, made in a thread of its own.

    Raises Unavailable with the text `failure` after `timeout_s`; the thread is then abandoned.
    Ctrl-C waits up to five seconds for the call, because Ray aborts a process that exits during
    one.
    """
    result = start_thread(call, name="call-with-timeout")
    try:
        return result.result(timeout_s)
    except TimeoutError:
        if result.done():  # the call's own TimeoutError, or it ended just now
            return result.result()
        raise Unavailable(f"{failure} within {timeout_s:.0f} s") from None
    except KeyboardInterrupt:
        wait([result], timeout=min(timeout_s, _INTERRUPT_GRACE_S))
        raise
