"""The workers this router knows, kept up to date by whoever runs the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from protocol.ids import Role, WorkerRef
from router.config import RouterConfig
from router.workers.worker_client import WorkerClient


class WorkerSet:
    """The set of followed workers. One member per incarnation; lives on one event loop."""

    def __init__(self, *, router_id: str, secret: bytes, config: RouterConfig) -> None:
        self._router_id = router_id
        self._secret = secret
        self._config = config
        self._members: dict[tuple[str, int], WorkerClient] = {}
        self._changed = asyncio.Event()
        self._refreshing: asyncio.Future[list[None]] | None = None
        #: Called after each report of a worker and each change of the set.
        self.on_news: Callable[[], None] = lambda: None

    def set(self, refs: Sequence[WorkerRef]) -> None:
        """Follow exactly these workers: new ones are connected to, others leave once their requests
        have ended. The same worker with a new epoch is a new worker."""
        wanted = {(ref.worker_id, ref.epoch): ref for ref in refs}
        for key, ref in wanted.items():
            member = self._members.get(key)
            if member is None or not member.stay():
                self._members[key] = WorkerClient(
                    ref,
                    router_id=self._router_id,
                    secret=self._secret,
                    config=self._config,
                    on_change=self._on_change,
                    on_report=lambda: self.on_news(),
                )
        for key, member in list(self._members.items()):
            if key not in wanted and not member.leaving:
                member.leave()

    def ready(self, role: Role) -> list[WorkerClient]:
        """The workers of a role that take requests."""
        return [m for m in self._members.values() if m.ref.role is role and m.ready]

    def all(self) -> list[WorkerClient]:
        """Every followed worker, leaving ones included."""
        return list(self._members.values())

    def longest(self) -> tuple[int, int] | None:
        """Tokens of the longest sequence that some ready decode worker takes.

        First by its context alone, then by context and KV pool together. None without a worker.
        """
        decodes = self.ready(Role.DECODE)
        if not decodes:
            return None
        return max(m.max_model_len for m in decodes), max(m.capacity for m in decodes)

    async def changed(self, timeout_s: float) -> None:
        """Return when a worker has joined, left or been lost, or after the time."""
        event = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    async def refresh(self) -> None:
        """Ask every worker for its status; who asks meanwhile waits for the same answers."""
        if self._refreshing is None or self._refreshing.done():
            answers = (member.refresh() for member in self.all())
            self._refreshing = asyncio.gather(*answers)
        await asyncio.shield(self._refreshing)

    async def close(self) -> None:
        """Stop following everybody."""
        await asyncio.gather(*(member.close() for member in self.all()))
        self._members.clear()

    def _on_change(self, member: WorkerClient) -> None:
        key = (member.ref.worker_id, member.ref.epoch)
        if member.closed and self._members.get(key) is member:
            del self._members[key]
        event, self._changed = self._changed, asyncio.Event()
        event.set()
        self.on_news()
