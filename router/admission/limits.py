"""Limits on the sequences in flight, of a router and of each caller."""

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
    """One caller's sequences in flight, and the arrivals of its latest requests."""

    in_flight: int = 0
    recent: deque[float] = field(default_factory=deque)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A caller's requests a minute, as far as this router counts them: how many it may start, and
    in how many seconds the next of those already started no longer counts."""

    limit: int
    remaining: int
    reset_s: float


class InflightLimits:
    """Counts sequences in flight. Checked before any text is processed."""

    def __init__(
        self, *, limit: int, retry_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._uses: dict[str, _Use] = {}
        self.num_routers = 1  # the limits of a key are shared out over them
        self.in_flight = 0
        self.draining = False
        self._timeouts: set[asyncio.Timeout] = set()  # of requests in flight, set by `close`

    @contextmanager
    def enter(self, sequences: int, caller: Caller = ANYONE, *, param: str = "n") -> Iterator[None]:
        """Count `sequences` of a caller for the length of the block; `param` is its field.

        Raises Unavailable once closed, Overloaded when a limit would be exceeded, InvalidRequest
        when a limit is lower than `sequences`.
        """
        limit = min(self._limit, caller.max_requests or self._limit)
        if sequences > limit:
            raise InvalidRequest(
                f"{param} asks for {sequences} sequences, at most {limit} can run", param=param
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

    def rate(self, caller: Caller) -> RateLimit | None:
        """Where the caller stands with its requests a minute; None without such a limit."""
        limit = share(caller.requests_per_minute, self.num_routers)
        if limit is None:
            return None
        now, use = self._clock(), self._uses.get(caller.name, _Use())
        recent = [start for start in use.recent if start > now - _MINUTE_S]
        reset_s = recent[0] + _MINUTE_S - now if recent else 0.0
        return RateLimit(limit=limit, remaining=max(0, limit - len(recent)), reset_s=reset_s)

    @asynccontextmanager
    async def until_closed(self) -> AsyncIterator[None]:
        """Run a request in the block; `close` ends it with Unavailable."""
        try:
            async with asyncio.timeout(None) as end:
                self._timeouts.add(end)
                try:
                    yield
                finally:
                    self._timeouts.discard(end)
        except TimeoutError:
            raise Unavailable(
                "this router stops, the request is not over", retry_after_s=self._retry_after_s
            ) from None

    def close(self) -> None:
        """Refuse new requests, and end those in flight."""
        self.draining = True
        timeouts, self._timeouts = self._timeouts, set()
        for end in timeouts:
            end.reschedule(0.0)

    def _check_caller(self, caller: Caller, use: _Use, sequences: int) -> None:
        """Raise Overloaded when the caller has reached a limit of its own; count its request."""
        limit = share(caller.max_requests, self.num_routers)
        rate = share(caller.requests_per_minute, self.num_routers)
        # With nothing in flight a request may exceed the share.
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
