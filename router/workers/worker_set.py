"""The workers that this router follows."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

from protocol.ids import Role, WorkerRef
from router.config import RouterConfig
from router.workers.balance import Newcomers, surplus
from router.workers.bookkeeping import PromptBlocks
from router.workers.worker_client import WorkerClient

#: A choice looks at so many workers of a role, and at so many more that hold a part of the prompt:
#: the best of a sample is nearly as good, and takes a tenth of a millisecond among a thousand.
MAX_CANDIDATES = 24
_MAX_HOLDERS = 4


class WorkerSet:
    """One client per incarnation of a worker. Lives on one event loop."""

    def __init__(self, *, router_id: str, secret: bytes, config: RouterConfig) -> None:
        self._router_id = router_id
        self._secret = secret
        self._config = config
        self._clients: dict[tuple[str, int], WorkerClient] = {}
        self._by_role: dict[Role, list[WorkerClient]] = {role: [] for role in Role}
        self._changed = asyncio.Event()
        self._newcomers = Newcomers()
        self._refreshing: asyncio.Future[list[None]] | None = None
        #: Called after each report of a worker and each change of the set.
        self.on_report: Callable[[], None] = lambda: None

    def set(self, refs: Sequence[WorkerRef]) -> None:
        """Follow exactly these workers: connect to new ones, leave the others once their requests
        have ended. The same worker with a new epoch is a new worker."""
        wanted = {(ref.worker_id, ref.epoch): ref for ref in refs}
        for key, ref in wanted.items():
            client = self._clients.get(key)
            if client is None or not client.stay():
                self._clients[key] = WorkerClient(
                    ref,
                    router_id=self._router_id,
                    secret=self._secret,
                    config=self._config,
                    on_change=self._on_change,
                    on_report=lambda: self.on_report(),
                )
        self._group()
        for key, client in list(self._clients.items()):
            if key not in wanted and not client.leaving:
                client.leave()

    def ready(self, role: Role) -> list[WorkerClient]:
        return [w for w in self._clients.values() if w.role is role and w.ready]

    def candidates(
        self, role: Role, prompt: PromptBlocks, rng: random.Random
    ) -> list[WorkerClient]:
        """The ready workers that a choice should look at: all, or of many a random sample, and
        some of those that hold most of the prompt or are about to."""
        clients = self._by_role[role]
        if len(clients) <= MAX_CANDIDATES:
            return self.ready(role)
        sample = rng.sample(clients, MAX_CANDIDATES)
        chosen = dict.fromkeys((*sample, *_holders(clients, prompt, rng)))
        return [client for client in chosen if client.ready] or self.ready(role)

    def all(self) -> list[WorkerClient]:
        return list(self._clients.values())

    def precisions(self) -> dict[str, list[str]]:
        """How the weights of the ready workers are stored, by pool."""
        stored = {
            role.value: {w.status.precision for w in self.ready(role) if w.status is not None}
            for role in Role
        }
        return {role: sorted(kinds) for role, kinds in stored.items() if kinds}

    def longest(self) -> tuple[int, int] | None:
        """Tokens of the longest sequence that a ready decode worker takes: by its context alone,
        and by context and KV pool together. None without a worker."""
        decodes = self.ready(Role.DECODE)
        if not decodes:
            return None
        return max(w.max_model_len for w in decodes), max(w.capacity for w in decodes)

    def balance(self, now: float) -> None:
        """Have sequences move to workers that have just begun to decode. Call about once a
        second."""
        decodes = {worker.ref.worker_id: worker for worker in self.ready(Role.DECODE)}
        newcomers = self._newcomers.see(set(decodes), now)
        if newcomers:
            nothing = PromptBlocks(())
            views = [worker.view(nothing) for worker in decodes.values()]
            for name, count in surplus(views, newcomers).items():
                decodes[name].spread(count)

    async def changed(self, timeout_s: float) -> None:
        """Return when a worker has joined, left or been lost, or after the time."""
        event = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    async def refresh(self) -> None:
        """Ask every worker for its status; concurrent callers share the answers."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.gather(*(client.refresh() for client in self.all()))
        await asyncio.shield(self._refreshing)

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.all()))
        self._clients.clear()

    def _group(self) -> None:
        clients = self._clients.values()
        self._by_role = {role: [c for c in clients if c.role is role] for role in Role}

    def _on_change(self, client: WorkerClient) -> None:
        key = (client.ref.worker_id, client.ref.epoch)
        if client.closed and self._clients.get(key) is client:
            del self._clients[key]
        self._group()
        event, self._changed = self._changed, asyncio.Event()
        event.set()
        self.on_report()


def _holders(
    clients: Sequence[WorkerClient], prompt: PromptBlocks, rng: random.Random
) -> list[WorkerClient]:
    """Workers that have, or will have, the longest part of a prompt: all of it, half or some."""
    blocks = next((found for c in clients[:_MAX_HOLDERS] if (found := c.blocks_of(prompt))), [])
    holders: dict[WorkerClient, None] = {}
    for place in dict.fromkeys((len(blocks) - 1, 3 * len(blocks) // 4, len(blocks) // 2, 0)):
        room = _MAX_HOLDERS - len(holders)
        if not blocks or not room:
            break
        having = [c for c in clients if c.prefix.has(blocks[place]) and c not in holders]
        holders |= dict.fromkeys(having if len(having) <= room else rng.sample(having, room))
    return list(holders)
