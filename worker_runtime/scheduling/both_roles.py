"""The schedulers of both roles on one worker: one engine, one pool of blocks. Pure.

A role is what routers give a worker; what it was given before stays and ends in its time. So both
schedulers live as long as the worker. Each step belongs to one of them: they take turns while both
have work, and prompts then run in chunks that the decoding sequences can bear.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from engine.batch import StepBatch, StepResult
from engine.kv.allocator import BlockAllocator
from protocol.errors import ErrorInfo
from protocol.ids import Role
from protocol.messages import WorkerLoad
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.messages import (
    Command,
    CopyDone,
    FilesListed,
    Lend,
    Lent,
    RoleChanged,
    Snapshot,
    StepOutput,
    Submitted,
)
from worker_runtime.scheduling.peer_blocks import PeerBlocks
from worker_runtime.scheduling.scheduler import Scheduler
from worker_runtime.scheduling.sequence import Sequence

AnyScheduler = Scheduler[Any]


class BothRoles:
    """Drives the schedulers of a worker as one. Not thread-safe: the step thread owns it."""

    def __init__(
        self,
        schedulers: Mapping[Role, AnyScheduler],
        blocks: BlockAllocator,
        role: Role,
        tiers: KVTiers | None = None,
        peers: PeerBlocks | None = None,
    ) -> None:
        """`schedulers` share `blocks`, `tiers` and `peers`."""
        self.role = role
        self._schedulers = schedulers
        self._all = tuple(schedulers.values())
        self._blocks = blocks
        self._tiers = tiers
        self._peers = peers
        self._inflight: deque[AnyScheduler] = deque()  # whose step, oldest first
        self._last: AnyScheduler = self._all[-1]
        self._num_commands = 0
        self.take_output()

    # --- commands and results -------------------------------------------------------------------

    @property
    def output(self) -> StepOutput:
        """What was decided since `take_output`, in order: the schedulers write into one output."""
        return self._all[0].output

    def take_output(self) -> StepOutput:
        """What was decided since the last call."""
        taken, fresh = self.output, StepOutput()
        for scheduler in self._all:
            scheduler.output = fresh
        if self._peers is not None:
            self._peers.output = fresh
        return taken

    def handle(self, command: Command, now: float) -> None:
        """Other commands are for the scheduler that knows their key: both look."""
        self._num_commands += 1
        match command:
            case RoleChanged(role=role):
                self.role = role
            case Submitted(role=role):
                self._schedulers[role].handle(command, now)
            case CopyDone(number=number, result=result):
                if self._tiers is not None:
                    self._go_on(self._tiers.done(number, result, now), now)
            case FilesListed(names=names, bytes_per_second=rate):
                if self._tiers is not None:
                    self._tiers.listed(names, rate, now)
            case Lend() | Lent():
                self._peers_take(command, now)
            case _:
                if self._peers_take(command, now):
                    return
                for scheduler in self._all:
                    scheduler.handle(command, now)

    def _peers_take(self, command: Command, now: float) -> bool:
        return self._peers is not None and self._peers.handle(command, now)

    def _go_on(self, sequences: Iterable[Sequence], now: float) -> None:
        """The load that these waited for is over. Both schedulers have the same blocks."""
        for sequence in sequences:
            self._last.go_on(sequence, now)

    def fail_all(self, error: ErrorInfo) -> None:
        """Fail every request: the engine is broken, and another worker may serve them."""
        for scheduler in self._all:
            scheduler.fail_all(error)

    def apply(self, result: StepResult, now: float) -> None:
        """Take the result of the oldest step in flight."""
        owner = self._inflight.popleft()
        owner.apply(result, now)
        for scheduler in self._all:
            if scheduler is not owner:
                scheduler.passed(now)

    # --- steps ----------------------------------------------------------------------------------

    def admit(self, now: float) -> None:
        """Give arrived requests what they can have before the next plan."""
        for scheduler in self._all:
            scheduler.admit(now)

    def plan(self, now: float) -> StepBatch | None:
        """The next step: of the scheduler whose turn it is, or of the other when it has none."""
        if self._tiers is not None:
            self._go_on(self._tiers.expire(now), now)
        if self._peers is not None:
            self._peers.expire(now)
        busy = sum(scheduler.num_unfinished > 0 for scheduler in self._all) > 1
        for scheduler in sorted(self._all, key=lambda each: each is self._last):
            scheduler.shares_steps = busy
            batch = scheduler.plan(now)
            if batch is not None:
                self._last = scheduler
                self._inflight.append(scheduler)
                return batch
        return None

    def launched(self, step: int) -> None:
        """The planned step runs under this number."""
        self._inflight[-1].launched(step)

    def remaining_s(self, now: float) -> float:
        """Seconds for which the newest step in flight surely runs on; not positive when unknown."""
        return self._inflight[-1].remaining_s(now) if self._inflight else 0.0

    def next_deadline(self) -> float:
        """When the schedulers must run again even if no command arrives."""
        parts = (*self._all, self._tiers, self._peers)
        return min(part.next_deadline() for part in parts if part is not None)

    # --- views ----------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The present state; takes the changes of the prefix cache, and has the tiers copy."""
        snapshots = {role: each.snapshot() for role, each in self._schedulers.items()}
        counters: Counter[str] = Counter()
        cache: dict[bytes, bool] = {}
        for snapshot in snapshots.values():
            counters.update(snapshot.counters)
            cache.update(snapshot.cache)
        num_unfinished = sum(snapshot.num_unfinished for snapshot in snapshots.values())
        if self._peers is not None:
            self._peers.offer()
            counters.update(self._peers.counters.read())
            num_unfinished += self._peers.num_active
        if self._tiers is not None:
            self.output.copies += self._tiers.take_copies()
            counters.update(self._tiers.counts())
            cache = self._tiers.changes(cache)
        return Snapshot(
            load=self._load({role: snapshot.load for role, snapshot in snapshots.items()}),
            num_unfinished=num_unfinished,
            counters=counters,
            cache=cache,
            tiers=() if self._tiers is None else self._tiers.load(),
        )

    def _load(self, loads: Mapping[Role, WorkerLoad]) -> WorkerLoad:
        """One report: work of both roles adds up, `tokens_per_second` is of the present role."""
        prefill, decode = loads[Role.PREFILL], loads[Role.DECODE]
        return replace(
            decode,
            running=prefill.running + decode.running,
            waiting=prefill.waiting + decode.waiting,
            waiting_tokens=prefill.waiting_tokens + decode.waiting_tokens,
            backlog=prefill.backlog if self.role is Role.PREFILL else (),
            free_blocks=loads[self.role].free_blocks,
            tokens_per_second=loads[self.role].tokens_per_second,
            num_commands=self._num_commands,
            prompts=prefill.prompts + decode.prompts,
            free_at=max(prefill.free_at, decode.free_at),
        )

    def num_leaked_blocks(self) -> int:
        """Blocks in use without a request or a copy; more than 0 is a defect. Call with no step in
        flight."""
        loans = 0 if self._peers is None else self._peers.num_active
        if loans or any(scheduler.num_unfinished for scheduler in self._all):
            return 0
        num_leased = 0 if self._tiers is None else len(self._tiers.copies.leases)
        return self._blocks.num_held + self._blocks.num_quarantined - num_leased
