"""The directory: one small Ray actor that knows the members, the configuration and the secret.

Workers and routers report themselves about once a second; routers follow `watch`, a long poll. The
actor is restarted by Ray if it dies: it comes back empty under a new incarnation and fills up with
the next round of reports, and routers keep the workers they know until it has
(membership.Following).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any

import ray

from cluster.call_timeout import ANSWER_S, within
from cluster.config.schema import ClusterConfig
from cluster.membership.table import Attention, Member, Membership, View
from protocol.ids import new_epoch

NAMESPACE = "baton"
HEAD_NODE_RESOURCE = "node:__internal_head__"
NAME = "directory"
#: So often, at least, somebody who watches looks while a member may be silent.
_LOOKS = 4


class Directory:
    """The actor's body; every method runs on its event loop."""

    def __init__(self, *, secret: bytes, config: ClusterConfig) -> None:
        self._secret = secret
        self._config = config
        expiry_s = config.lifecycle.expiry_s
        self._table = Membership(incarnation=new_epoch(), expiry_s=expiry_s)
        self._attention = Attention(most_s=expiry_s / _LOOKS)
        self._changed = asyncio.Event()

    async def secret(self) -> bytes:
        """The secret of control calls and tickets."""
        return self._secret

    async def config(self) -> ClusterConfig:
        """What the cluster was brought up with."""
        return self._config

    async def report(self, member: Member) -> None:
        """A member says what and how it is."""
        if self._table.report(member, self._now()):
            self._announce()

    async def leave(self, name: str, epoch: int) -> None:
        """A member has ended."""
        if self._table.leave(name, epoch):
            self._announce()

    async def view(self) -> View:
        """The members now."""
        self._expire()
        return self._table.view()

    async def watch(self, incarnation: int, version: int, timeout_s: float) -> View:
        """The members, as soon as they differ from the version known, or after the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            view = await self.view()
            left = deadline - time.monotonic()
            if (view.incarnation, view.version) != (incarnation, version) or left <= 0:
                return view
            pause = min(left, self._table.next_expiry(self._now()) + 0.01, self._attention.most_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    def _expire(self) -> None:
        if self._table.expire(self._now()):
            self._announce()

    def _now(self) -> float:
        return self._attention.time(time.monotonic())

    def _announce(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()


def create_directory(config: ClusterConfig) -> None:
    """Start the directory of this Ray cluster, with a secret of its own, unless one runs. Raises
    Unavailable when Ray does not answer."""
    actor = ray.remote(Directory).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        # On the head node, so that it never keeps a worker node from being given back.
        resources={HEAD_NODE_RESOURCE: 0.001},
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=10_000,
    )
    within(
        ANSWER_S,
        "Ray did not start the directory",
        lambda: actor.remote(secret=secrets.token_bytes(32), config=config),
    )


def find_directory() -> Any:
    """The handle of the running directory. Raises ValueError when there is none, Unavailable when
    Ray does not answer."""
    return within(
        ANSWER_S,
        "Ray did not find the directory",
        lambda: ray.get_actor(NAME, namespace=NAMESPACE),
    )
