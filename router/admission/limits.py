"""The bounds on what a router and each caller have in flight, so that it refuses at once instead of
drowning."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from protocol.errors import InvalidRequest, Overloaded, Unavailable
from router.auth.keys import ANYONE, Caller, share

_MINUTE_S = 60.0


@dataclass(slots=True)
class _Use:
    """What one caller has: sequences in flight, and when its latest requests came."""

    in_flight: int = 0
    recent: deque[float] = field(default_factory=deque)


class InflightLimits:
    """Counts sequences in flight. Refusing costs nothing: it happens before any text is touched."""

    def __init__(
        self, *, limit: int, retry_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._uses: dict[str, _Use] = {}
        self.num_routers = 1  # what a key may have is shared out over them
        self.in_flight = 0
        self.draining = False
        self._ends: set[asyncio.Timeout] = set()  # of what is in flight; none is set

    @contextmanager
    def enter(self, sequences: int, caller: Caller = ANYONE, *, param: str = "n") -> Iterator[None]:
        """Count `sequences` of a caller for the length of the block; `param` asked for so many.

        Raises Unavailable once closed, Overloaded when a bound would be passed, InvalidRequest
        when a bound is too small for it at any time.
        """
        most = min(self._limit, caller.max_requests or self._limit)
        if sequences > most:
            raise InvalidRequest(
                f"{param} asks for {sequences} sequences, at most {most} can run", param=param
            )
        if self.draining:
            raise Unavailable("this router is draining", retry_after_s=self._retry_after_s)
        if self.in_flight + sequences > self._limit:
            raise Overloaded(
                f"{self.in_flight} of {self._limit} sequences are in flight",
                retry_after_s=self._retry_after_s,
            )
        use = self._uses.setdefault(caller.name, _Use())
        self._check_caller(caller, use, sequences)
        self._add(use, sequences)
        try:
            yield
        finally:
            self._add(use, -sequences)

    @asynccontextmanager
    async def until_closed(self) -> AsyncIterator[None]:
        """The length of a request, which `close` ends with Unavailable."""
        try:
            async with asyncio.timeout(None) as end:
                self._ends.add(end)
                try:
                    yield
                finally:
                    self._ends.discard(end)
        except TimeoutError:
            raise Unavailable(
                "this router stops, the request is not over", retry_after_s=self._retry_after_s
            ) from None

    def close(self) -> None:
        """Refuse what comes, and end what is in flight."""
        self.draining = True
        ends, self._ends = self._ends, set()
        for end in ends:
            end.reschedule(0.0)

    def _check_caller(self, caller: Caller, use: _Use, sequences: int) -> None:
        """Raise Overloaded when the caller has reached a bound of its own; count its request."""
        limit = share(caller.max_requests, self.num_routers)
        rate = share(caller.requests_per_minute, self.num_routers)
        # With nothing in flight a request goes on even if it is more than the share.
        if limit is not None and use.in_flight and use.in_flight + sequences > limit:
            raise Overloaded(
                f"API key {caller.name!r} has {use.in_flight} of its {limit} sequences in flight",
                retry_after_s=self._retry_after_s,
            )
        if rate is not None:
            now = self._clock()
            while use.recent and use.recent[0] <= now - _MINUTE_S:
                use.recent.popleft()
            if len(use.recent) >= rate:
                raise Overloaded(
                    f"the API key {caller.name!r} may start {rate} requests a minute",
                    retry_after_s=use.recent[0] + _MINUTE_S - now,
                )
            use.recent.append(now)

    def _add(self, use: _Use, sequences: int) -> None:
        use.in_flight += sequences
        self.in_flight += sequences
