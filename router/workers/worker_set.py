"""The workers that this router follows."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence

from protocol.ids import Role, WorkerRef
from router.config import RouterConfig
from router.workers.balance import Newcomers, surplus
from router.workers.bookkeeping import PromptBlocks
from router.workers.holders import Holders
from router.workers.worker_client import WorkerClient

#: A choice looks at so many workers of a role, and at so many more that hold a part of the prompt:
#: the best of a sample is nearly as good, and takes a tenth of a millisecond among a thousand.
MAX_CANDIDATES = 24
_MAX_HOLDERS = 4
#: Other workers that one has to do with, whatever holders there are: fewer than it keeps links to
#: (kv_transfer.config.TransferConfig.max_peers). It still has a choice of two at least.
_MAX_LINKS = 64
_MIN_NEAR = 2
_LOOK_S = 0.05


class WorkerSet:
    """One client per incarnation of a worker. Lives on one event loop."""

    def __init__(self, *, router_id: str, secret: bytes, config: RouterConfig) -> None:
        self._router_id = router_id
        self._secret = secret
        self._config = config
        self._clients: dict[tuple[str, int], WorkerClient] = {}
        # Those that take requests; of thousands none is looked at for one request.
        self._ready: dict[Role, dict[WorkerClient, None]] = {role: {} for role in Role}
        self._leaving: dict[WorkerClient, None] = {}
        self._longest: tuple[int, int] | None = None
        self._holders: Holders[WorkerClient] = Holders()
        self._in_order: dict[Role, list[WorkerClient]] = {}  # made when needed
        self._changed = asyncio.Event()
        self._newcomers = Newcomers()
        self._refreshing: asyncio.Future[list[None]] | None = None
        self._told = False
        self._settled_by = time.monotonic() + config.connect_timeout_s
        #: Called after each report of a worker and each change of the set.
        self.on_report: Callable[[], None] = lambda: None
        #: Called after each report of a worker.
        self.on_load: Callable[[], None] = lambda: None

    def set(self, refs: Sequence[WorkerRef]) -> None:
        """Follow exactly these workers: connect to new ones, leave the others once their requests
        have ended. The same worker with a new epoch is a new worker."""
        self._told = True
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
                    on_report=self._on_report,
                    on_mark=self._holders.note,
                )
        self._group()
        for key, client in list(self._clients.items()):
            if key not in wanted and not client.leaving:
                client.leave()

    def ready(self, role: Role) -> list[WorkerClient]:
        return list(self._ready[role])

    def has_ready(self, role: Role) -> bool:
        """Whether a worker with this role takes requests."""
        return bool(self._ready[role])

    def sample(self, role: Role, rng: random.Random) -> list[WorkerClient]:
        """Ready workers: all of a few, some of many."""
        ready = list(self._ready[role])
        return ready if len(ready) <= MAX_CANDIDATES else rng.sample(ready, MAX_CANDIDATES)

    def leaving(self) -> list[WorkerClient]:
        """Those that take nothing new, but still have KV."""
        return list(self._leaving)

    def candidates(
        self, prompt: PromptBlocks, rng: random.Random
    ) -> dict[Role, list[WorkerClient]]:
        """The ready workers that a choice should look at: all, or of many a random sample, and
        some of those that hold most of the prompt or are about to."""
        found = self._samples(rng)
        for role, sample in found.items():
            if len(sample) < len(self._ready[role]):
                having = self._having(role, prompt, sample, rng)
                found[role] = list(dict.fromkeys((*sample, *having)))
        return found

    def _samples(self, rng: random.Random) -> dict[Role, list[WorkerClient]]:
        """Of both roles. If there are more workers than a worker keeps links to, both samples are
        the workers around one random place, in the order of their names."""
        sizes = {role: len(self._ready[role]) for role in Role}
        if max(sizes.values()) <= _MAX_LINKS or not min(sizes.values()):
            return {role: self.sample(role, rng) for role in Role}
        if not self._in_order:
            self._in_order = {role: sorted(self._ready[role], key=_name) for role in Role}
        place, total = rng.random(), sum(sizes.values())
        return {
            role: _near(place, clients, total - len(clients))
            for role, clients in self._in_order.items()
        }

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
        decodes = self._ready[Role.DECODE]
        if self._longest is None and decodes:
            longest = max(w.max_model_len for w in decodes)
            self._longest = longest, max(w.capacity for w in decodes)
        return self._longest

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

    async def settled(self) -> None:
        """Return once it is known which workers are ready. A router that has just started does not
        know, while other routers of its port do: it is told and connects within moments, otherwise
        in the time to connect."""
        while not self.has_ready(Role.DECODE):
            unknown = not self._told or any(client.status is None for client in self.all())
            left_s = self._settled_by - time.monotonic()
            if not unknown or left_s <= 0:
                return
            await self.changed(min(left_s, _LOOK_S))

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

    def _having(
        self, role: Role, prompt: PromptBlocks, sample: Sequence[WorkerClient], rng: random.Random
    ) -> list[WorkerClient]:
        """Ready workers that have, or will have, the longest parts of a prompt."""
        alike = next((marks for client in sample if (marks := client.marks_of(prompt))), ())
        found: dict[WorkerClient, None] = {}
        for owners in self._holders.find(reversed(alike)):
            ready = [w for w in owners if w in self._ready[role] and w not in found]
            room = _MAX_HOLDERS - len(found)
            found |= dict.fromkeys(ready if len(ready) <= room else rng.sample(ready, room))
            if len(found) == _MAX_HOLDERS:
                break
        return list(found)

    def _group(self) -> None:
        for clients in (*self._ready.values(), self._leaving):
            clients.clear()
        for client in self._clients.values():
            self._place(client)

    def _place(self, client: WorkerClient) -> None:
        """Where it belongs now: a client tells each change of its role, state and connection."""
        self._longest = None
        self._in_order.clear()
        for role, clients in self._ready.items():
            _sort_in(client, clients, belongs=client.ready and client.role is role)
        _sort_in(client, self._leaving, belongs=client.connected and not client.ready)

    def _on_report(self) -> None:
        self.on_report()
        self.on_load()

    def _on_change(self, client: WorkerClient) -> None:
        key = (client.ref.worker_id, client.ref.epoch)
        if client.closed and self._clients.get(key) is client:
            del self._clients[key]
        self._place(client)
        event, self._changed = self._changed, asyncio.Event()
        event.set()
        self.on_report()


def _sort_in(client: WorkerClient, group: dict[WorkerClient, None], *, belongs: bool) -> None:
    if belongs:
        group[client] = None
    else:
        group.pop(client, None)


def _name(client: WorkerClient) -> str:
    return client.ref.worker_id


def _near(place: float, clients: Sequence[WorkerClient], num_others: int) -> list[WorkerClient]:
    """The workers of one pool around a place between 0 and 1: fewer, the more workers of the other
    pool fall to each."""
    share = (_MAX_LINKS - MAX_CANDIDATES) * len(clients) // num_others
    count = min(len(clients), MAX_CANDIDATES, max(_MIN_NEAR, share))
    first = int(place * len(clients)) - count // 2
    return [clients[(first + number) % len(clients)] for number in range(count)]
