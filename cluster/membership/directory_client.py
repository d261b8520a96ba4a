"""A replica's connection to the directory: heartbeats out, views in.

What has changed comes with the answer to a heartbeat. Routers must know at once and follow with
long polls as well; if a thousand workers did, each change would occupy the directory for seconds.
When the directory does not answer, that is logged and the replica continues with its last view.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.config.schema import LifecycleSection
from cluster.membership.directory import find_directory
from cluster.membership.table import Replica, RestartGrace, View, ViewChange, cluster_protocol
from cluster.ray_private import actor_state
from concurrency.threads import start_thread
from observability.logging import get_logger
from protocol.errors import Unavailable
from protocol.loads import RouterLoad
from protocol.messages import WorkerLoad
from protocol.states import WorkerState

log = get_logger(__name__)

_WATCH_S = 5.0
#: A directory is replaced that has not answered for so long, nor since Ray was first seen to have
#: it running: one that starts would only be delayed.
_FROZEN_S = 9.0
_RUNNING_S = 5.0
_STARTING_S = 0.2
_ANSWER_S = 3.0


class DirectoryClient:
    """Reports one replica and learns the directory's views.

    describe, load: called before each report; the replica as it is then, and what it has to do.
    on_view: called with each view, at least every few seconds; a restart of the directory removes
    no replica for `expiry_s`. at_once: changes are told when they happen, not with the next
    heartbeat.
    """

    def __init__(
        self,
        times: LifecycleSection,
        *,
        describe: Callable[[], Replica],
        load: Callable[[], WorkerLoad | RouterLoad],
        on_view: Callable[[View], None],
        at_once: bool = False,
    ) -> None:
        self.directory = find_directory()
        self._times = times
        self._describe = describe
        self._load = load
        self._on_view = on_view
        self._at_once = at_once
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._known = View(incarnation=-1, version=-1)
        self._grace = RestartGrace(grace_s=times.expiry_s)
        self._answered_at = self._viewed_at = time.monotonic()
        self._overdue = False  # the latest answer
        self._replacing: Future[None] | None = None
        self._running: tuple[int | None, float] = None, 0.0  # restarts before it, seen since
        self._strangers = set[str]()

    @property
    def silence_s(self) -> float:
        """Seconds since the directory last answered; it does at least every few."""
        return time.monotonic() - self._answered_at

    def start(self) -> None:
        self._tasks = (asyncio.create_task(self._send_heartbeats(), name="heartbeat"),)
        if self._at_once:
            self._tasks += (asyncio.create_task(self._follow(), name="directory watch"),)

    def check_health(self) -> None:
        """Raise Unavailable when a task has failed."""
        for task in self._tasks:
            if task.done():
                raise Unavailable(f"the {task.get_name()} task ended")

    async def report(self) -> WorkerState:
        """Report the replica at once; the state reported."""
        replica = self._describe()
        known = None if self._at_once else (self._known.incarnation, self._known.version)
        reporting = self.directory.report.remote(replica, self._load(), known)
        found = await self._call(reporting, _ANSWER_S)
        if found is not None:
            self._take(found)
        return replica.state

    async def leave(self) -> None:
        """Stop heartbeats and following, and take the replica off the directory."""
        for task in self._tasks:
            task.cancel()
        replica = self._describe()
        leaving = self.directory.leave.remote(replica.name, replica.epoch)
        await self._call(leaving, self._times.expiry_s)

    async def _send_heartbeats(self) -> None:
        while True:
            starting = await self.report() is WorkerState.STARTING
            if self._overdue:
                await self._replace_if_frozen()
            await asyncio.sleep(_STARTING_S if starting else self._times.heartbeat_s)

    async def _follow(self) -> None:
        while True:
            known = self._known
            call = self.directory.follow.remote(known.incarnation, known.version, _WATCH_S)
            found = await self._call(call, _WATCH_S + _ANSWER_S)
            if found is None:
                await asyncio.sleep(self._times.heartbeat_s)
            else:
                self._take(found)

    def _take(self, found: View | ViewChange) -> None:
        known = self._known
        if isinstance(found, ViewChange):
            if found.incarnation != known.incarnation or found.version < known.version:
                return  # answers may overtake each other
            if found.version == known.version and time.monotonic() - self._viewed_at < _WATCH_S:
                return
            found = found.applied(known)
        self._known = found
        self._viewed_at = time.monotonic()
        self._on_view(self._understood(self._grace.complete(found, self._viewed_at)))

    def _understood(self, view: View) -> View:
        """Without replicas of a version that speaks otherwise, which are logged once."""
        protocol = cluster_protocol()
        own = view.understood(protocol)
        strangers = {r.name: r for r in view.replicas if r.protocol != protocol}
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
            try:
                async with asyncio.timeout(self._times.expiry_s):
                    await asyncio.shield(asyncio.wrap_future(self._replacing))
            except (RayError, TimeoutError) as error:
                _log_no_answer(error)

    def _end_frozen(self) -> None:
        """End a directory that stands still: Ray then starts it anew. Ray itself sees only that its
        process lives."""
        found = actor_state(self.directory)
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

    async def _call(self, call: Any, timeout_s: float) -> Any:
        """The answer; None if there is none, which is logged."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call
        except (RayError, TimeoutError) as error:
            self._overdue = isinstance(error, TimeoutError)
            _log_no_answer(error)
            return None
        self._overdue = False
        self._answered_at = time.monotonic()
        return answer


def _log_no_answer(error: Exception) -> None:
    log.warning("the directory does not answer", extra={"error": str(error) or "no answer in time"})
