"""A replica's connection to the directory: heartbeats out, views in.

When the directory does not answer, that is logged and the replica continues with its last view.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
from ray._private.state import actors
from ray.exceptions import RayError

from cluster.config.schema import LifecycleSection
from cluster.membership.directory import find_directory
from cluster.membership.table import Replica, RestartGrace, View, ViewChange
from concurrency.threads import start_thread
from observability.logging import get_logger
from protocol.errors import Unavailable
from protocol.messages import RouterLoad, WorkerLoad
from protocol.states import WorkerState
from rpc.methods import protocol_digest

log = get_logger(__name__)

_WATCH_S = 5.0
#: A directory is replaced that has not answered for so long, nor since Ray was first seen to have
#: it running: one that starts would only be delayed.
_FROZEN_S = 9.0
_RUNNING_S = 5.0
_STARTING_S = 0.2
_ANSWER_S = 2.0


class DirectoryClient:
    """Reports one replica and follows the directory's views.

    describe, load: called before each report; the replica as it is then, and what it has to do.
    on_view: called with each view, at least every few seconds; a restart of the directory removes
    no replica for `expiry_s`.
    """

    def __init__(
        self,
        times: LifecycleSection,
        *,
        describe: Callable[[], Replica],
        load: Callable[[], WorkerLoad | RouterLoad],
        on_view: Callable[[View], None],
    ) -> None:
        self.directory = find_directory()
        self._times = times
        self._describe = describe
        self._load = load
        self._on_view = on_view
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._answered_at = time.monotonic()
        self._replacing: Future[None] | None = None
        self._running: tuple[int | None, float] = None, 0.0  # restarts before it, seen since
        self._strangers = set[str]()

    @property
    def silence_s(self) -> float:
        """Seconds since the directory last answered; it does at least every few."""
        return time.monotonic() - self._answered_at

    def start(self) -> None:
        self._tasks = (
            asyncio.create_task(self._send_heartbeats(), name="heartbeat"),
            asyncio.create_task(self._follow(), name="directory watch"),
        )

    def check_health(self) -> None:
        """Raise Unavailable when one of the two has failed."""
        for task in self._tasks:
            if task.done():
                raise Unavailable(f"the {task.get_name()} task ended")

    async def report(self) -> WorkerState:
        """Report the replica at once; the state reported."""
        replica = self._describe()
        await self._call(self.directory.report.remote(replica, self._load()))
        return replica.state

    async def leave(self) -> None:
        """Stop heartbeats and following, and take the replica off the directory."""
        for task in self._tasks:
            task.cancel()
        replica = self._describe()
        await self._call(self.directory.leave.remote(replica.name, replica.epoch))

    async def _send_heartbeats(self) -> None:
        while True:
            starting = await self.report() is WorkerState.STARTING
            await asyncio.sleep(_STARTING_S if starting else self._times.heartbeat_s)

    async def _follow(self) -> None:
        grace = RestartGrace(grace_s=self._times.expiry_s)
        known = View(incarnation=-1, version=-1)
        while True:
            try:
                # After a silence any answer will do, at once.
                watch_s = _WATCH_S if self.silence_s < _WATCH_S + _ANSWER_S else 0.0
                call = self.directory.follow.remote(known.incarnation, known.version, watch_s)
                async with asyncio.timeout(watch_s + _ANSWER_S):
                    found: View | ViewChange = await call
            except (RayError, TimeoutError) as error:
                log.warning("the directory does not answer", extra={"error": str(error)})
                if isinstance(error, TimeoutError):
                    await self._replace_if_frozen()
                await asyncio.sleep(self._times.heartbeat_s)
                continue
            self._answered_at = time.monotonic()
            known = found.applied(known) if isinstance(found, ViewChange) else found
            self._on_view(self._understood(grace.complete(known, time.monotonic())))

    def _understood(self, view: View) -> View:
        """Without replicas of a version that speaks otherwise, which are logged once."""
        own = view.understood(protocol_digest())
        strangers = {r.name: r for r in view.replicas if r.protocol != protocol_digest()}
        for name in strangers.keys() - self._strangers:
            log.error(
                "not used: another version of Baton, whose messages differ",
                extra={"replica": name, "revision": strangers[name].revision},
            )
        self._strangers = set(strangers)
        return own

    async def _replace_if_frozen(self) -> None:
        """In a thread of its own: without a way to the head its calls do not return."""
        if self._replacing is None or self._replacing.done():
            self._replacing = start_thread(self._end_frozen, name="replace-directory")
            await self._call(asyncio.shield(asyncio.wrap_future(self._replacing)))

    def _end_frozen(self) -> None:
        """End a directory that stands still: Ray then starts it anew. Ray itself sees only that its
        process lives."""
        found = actors(self.directory._actor_id.hex())  # noqa: SLF001 - a handle tells it no other way
        restarts = found["NumRestarts"] if found.get("State") == "ALIVE" else None
        known, since = self._running
        if restarts != known:
            self._running = restarts, time.monotonic()
        elif (
            restarts is not None
            and self.silence_s >= _FROZEN_S
            and time.monotonic() - since >= _RUNNING_S
        ):
            log.error("the directory is replaced", extra={"silent_s": round(self.silence_s)})
            ray.kill(self.directory, no_restart=False)

    async def _call(self, call: Any) -> None:
        try:
            async with asyncio.timeout(self._times.expiry_s):
                await call
        except (RayError, TimeoutError) as error:
            log.warning("the directory does not answer", extra={"error": str(error)})
