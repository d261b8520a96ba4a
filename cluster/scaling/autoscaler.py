"""The loop that keeps both pools at the sizes that their load takes: one for each cluster.

A worker that is to go is drained first, so that its streams move or end, and the pool is made
smaller once the worker has gone: Ray Serve would choose another one to stop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.config.schema import ClusterConfig
from cluster.scaling.needs import DecodeNeed, PoolNeed, PrefillNeed, RouterSample, WorkerSample
from cluster.scaling.policy import (
    PoolDecision,
    PoolLimits,
    PoolSample,
    ScalingPolicy,
    victims,
)
from cluster.scaling.roles import RoleChange, RolePolicy, RoleView
from observability.logging import get_logger
from protocol.errors import BatonError
from protocol.ids import Role
from protocol.loads import RouterLoad
from protocol.messages import WorkerLoad

log = get_logger(__name__)

#: After a change that failed, a pool is left alone for so long.
_RETRY_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A ready replica with its latest load; `role` is None for a router."""

    name: str
    epoch: int
    role: Role | None
    load: WorkerLoad | RouterLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPool:
    """A pool as the cluster manager has it: the size it was given, and its running workers."""

    wanted: int
    running: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolScaling:
    """How a pool is scaled, for people and metrics. need: workers that the load takes; reason: what
    the load is; change: the last one, `changed_s` seconds ago."""

    role: Role
    wanted: int
    least: int
    most: int
    pinned: bool = False
    need: float = 0.0
    reason: str = ""
    change: str = ""
    changed_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """The roles, for people; `change` is the last one, `changed_s` seconds ago."""

    view: RoleView
    change: RoleChange | None
    changed_s: float | None


class PoolBackend(Protocol):
    """Changes the pools; errors are BatonErrors. All but `drain` block and run in a thread."""

    def sizes(self) -> Mapping[Role, RunningPool]:
        """Both pools."""

    def scale(self, sizes: Mapping[Role, int]) -> None:
        """Give pools new sizes."""

    async def drain(self, worker_id: str) -> None:
        """Let a worker finish what it has, and end."""

    async def change_role(self, worker_id: str, role: Role) -> None:
        """Give a worker the work of a role from now on."""

    def pinned(self) -> Sequence[Role]:
        """The pools whose size an operator has set. Blocks like `pin`, which records them."""

    def pin(self, roles: Iterable[Role]) -> None: ...


class Autoscaler:
    """Decides once every `interval_s`. reported: the ready replicas, with the roles that they have.
    A pool that is pinned keeps the size that an operator gave it. roles: None where workers keep
    their roles."""

    def __init__(
        self,
        policy: ScalingPolicy,
        backend: PoolBackend,
        reported: Callable[[], Sequence[Reported]],
        *,
        interval_s: float,
        on_change: Callable[[], None] = lambda: None,
        roles: RolePolicy | None = None,
    ) -> None:
        self._policy = policy
        self._roles = roles
        self._role_change: tuple[float, RoleChange] | None = None
        self._backend = backend
        self._reported = reported
        self._interval_s = interval_s
        self._on_change = on_change
        self._pinned: set[Role] | None = None  # not read yet
        self._leaving: dict[Role, set[str]] = {role: set() for role in Role}
        self._ready_at: dict[tuple[str, int], float] = {}
        self._totals: dict[tuple[str, int], tuple[int, int]] = {}
        self._paused_until = dict.fromkeys(Role, 0.0)
        self._state: dict[Role, PoolScaling] = {}
        self._changes: dict[Role, tuple[float, str]] = {}
        self._busy = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.step(time.monotonic())
            except BatonError as error:
                log.warning("the pools cannot be scaled now", extra={"error": error.message})
            except Exception:
                log.exception("scaling failed")
            await asyncio.sleep(self._interval_s)

    async def pin(self, roles: Iterable[Role], *, pinned: bool) -> frozenset[Role]:
        """Leave pools to an operator, or take them back; those that this changed. Returns when no
        change is under way."""
        async with self._busy:
            before = await self._read_pins()
            after = before | set(roles) if pinned else before - set(roles)
            await asyncio.to_thread(self._backend.pin, after)
            self._pinned = after
            for role in roles:  # those that are drained are replaced
                self._leaving[role].clear()
            return frozenset(before ^ after)

    async def _read_pins(self) -> set[Role]:
        if self._pinned is None:
            self._pinned = set(await asyncio.to_thread(self._backend.pinned))
        return self._pinned

    def roles(self, now: float) -> RoleState | None:
        """How the roles follow the load, as of the latest step; None where they do not."""
        if self._roles is None or self._roles.view is None:
            return None
        at, change = self._role_change or (0.0, None)
        return RoleState(
            view=self._roles.view, change=change, changed_s=None if change is None else now - at
        )

    def scaling(self) -> tuple[PoolScaling, ...]:
        """The autoscaled pools, as of the latest step."""
        return tuple(self._state.values())

    async def step(self, now: float) -> None:
        """Look at the load and change what is to be changed."""
        async with self._busy:
            pinned = await self._read_pins()
            sizes = await asyncio.to_thread(self._backend.sizes)
            workers, routers = self._sample(now)
            sizes = await self._shrink(sizes)
            pools = {
                role: PoolSample(
                    wanted=sizes[role].wanted - len(self._leaving[role]),
                    leaving=len(self._leaving[role]),
                    ready=tuple(w for w in workers[role] if w.worker_id not in self._leaving[role]),
                    pinned=role in pinned,
                )
                for role in Role
            }
            decisions = self._policy.decide(pools, routers, now)
            await self._change_role(workers, decisions, now)
            for role, decision in decisions.items():
                if self._policy.limits[role].fixed:
                    continue
                if now >= self._paused_until[role]:
                    await self._apply(role, pools[role], sizes[role], decision, now)
                self._publish(role, pools[role], decision, now)

    async def _change_role(
        self,
        workers: Mapping[Role, Sequence[WorkerSample]],
        decisions: Mapping[Role, PoolDecision],
        now: float,
    ) -> None:
        """Give one worker the work of the other role if that is due."""
        if self._roles is None:
            return
        needs = {role: PoolNeed(workers=d.need, reason=d.reason) for role, d in decisions.items()}
        change = self._roles.decide(workers, needs, now)
        if change is None:
            return
        try:
            await self._backend.change_role(change.worker_id, change.role)
        except BatonError as error:
            log.warning(
                "a role cannot be changed",
                extra={"worker": change.worker_id, "role": change.role, "error": error.message},
            )
            return
        self._role_change = now, change
        log.warning(
            "changing a role",
            extra={"worker": change.worker_id, "role": change.role, "reason": change.reason},
        )

    async def _shrink(self, sizes: Mapping[Role, RunningPool]) -> Mapping[Role, RunningPool]:
        """Give up the places of drained workers that have gone; the sizes then."""
        smaller = dict(sizes)
        for role, leaving in self._leaving.items():
            gone = leaving - sizes[role].running
            leaving -= gone
            wanted = max(0, sizes[role].wanted - len(gone))
            if gone:
                await asyncio.to_thread(self._backend.scale, {role: wanted})
                smaller[role] = RunningPool(wanted=wanted, running=sizes[role].running)
        return smaller

    async def _apply(
        self, role: Role, pool: PoolSample, size: RunningPool, decision: PoolDecision, now: float
    ) -> None:
        change = decision.replicas - pool.wanted
        try:
            if change > 0:
                # A worker that is being drained is replaced when its place is not given up.
                for name in sorted(self._leaving[role])[:change]:
                    self._leaving[role].discard(name)
                    change -= 1
                if change:
                    await asyncio.to_thread(self._backend.scale, {role: size.wanted + change})
            # A worker that an operator gave this role keeps its place in the other pool.
            own = [w for w in pool.ready if w.worker_id in size.running]
            for worker in victims(own, -change):
                await self._backend.drain(worker.worker_id)
                self._leaving[role].add(worker.worker_id)
        except BatonError as error:
            self._paused_until[role] = now + _RETRY_S
            log.warning(
                "a pool cannot be scaled",
                extra={"pool": role.value, "to": decision.replicas, "error": error.message},
            )
        else:
            if decision.replicas != pool.wanted:
                verb = "grew" if decision.replicas > pool.wanted else "shrank"
                text = f"{verb} from {pool.wanted} to {decision.replicas}: {decision.reason}"
                self._changes[role] = now, text
                log.warning(
                    "scaling a pool",
                    extra={
                        "pool": role.value,
                        "from": pool.wanted,
                        "to": decision.replicas,
                        "reason": decision.reason,
                    },
                )

    def _publish(self, role: Role, pool: PoolSample, decision: PoolDecision, now: float) -> None:
        known, limits = self._state.get(role), self._policy.limits[role]
        changed_at, change = self._changes.get(role, (None, ""))
        changed = changed_at == now
        self._state[role] = PoolScaling(
            role=role,
            wanted=decision.replicas if changed else pool.wanted,
            least=limits.min_replicas,
            most=limits.max_replicas,
            pinned=pool.pinned,
            need=decision.need,
            reason=decision.reason,
            change=change,
            changed_s=None if changed_at is None else now - changed_at,
        )
        state = self._state[role]
        if known is None or (known.wanted, known.pinned) != (state.wanted, state.pinned):
            self._on_change()

    def _sample(self, now: float) -> tuple[dict[Role, list[WorkerSample]], RouterSample]:
        workers: dict[Role, list[WorkerSample]] = {role: [] for role in Role}
        waiting = blocked = arrived = refused = 0
        seen = set()
        for replica in self._reported():
            key = replica.name, replica.epoch
            seen.add(key)
            load = replica.load
            if isinstance(load, WorkerLoad):
                assert replica.role is not None
                age_s = now - self._ready_at.setdefault(key, now)
                sample = WorkerSample(worker_id=replica.name, age_s=age_s, load=load)
                workers[replica.role].append(sample)
                continue
            totals = load.arrived_tokens, load.refused_for_pace
            before = self._totals.get(key, totals)  # a router's past is not of this moment
            self._totals[key] = totals
            waiting += load.waiting_tokens
            blocked += load.blocked_tokens
            arrived += totals[0] - before[0]
            refused += totals[1] - before[1]
        for known in (self._ready_at, self._totals):
            for key in known.keys() - seen:
                del known[key]
        routers = RouterSample(
            waiting_tokens=waiting,
            blocked_tokens=blocked,
            arrived_tokens=arrived,
            refused_for_pace=refused,
        )
        return workers, routers


def _limits(config: ClusterConfig, role: Role) -> PoolLimits:
    pool, gpus = config.pool(role), config.gpus_of(role)
    if pool.max_replicas is None:
        return PoolLimits(gpus=gpus, fixed=True)
    return PoolLimits(min_replicas=pool.min_replicas, max_replicas=pool.max_replicas, gpus=gpus)


def make_autoscaler(
    config: ClusterConfig,
    backend: PoolBackend,
    reported: Callable[[], Sequence[Reported]],
    *,
    on_change: Callable[[], None],
) -> Autoscaler:
    """The autoscaler that a configuration describes; pools without bounds keep their size."""
    scaling, decode = config.scaling, config.decode
    limits = {role: _limits(config, role) for role in Role}
    policy = ScalingPolicy(
        limits,
        prefill=PrefillNeed(scaling.ttft_s),
        decode=DecodeNeed(
            step_s=scaling.decode_step_s,
            max_num_seqs=decode.worker.max_num_seqs,
            block_size=decode.engine.block_size,
        ),
        keep_s=scaling.keep_s,
        keep_starts=scaling.keep_starts,
        gpus=scaling.gpus,
    )
    roles = None
    if scaling.roles:
        kept = {role: config.pool(role).min_replicas for role in Role}
        roles = RolePolicy(kept, cost_s=scaling.role_cost_s)
    return Autoscaler(
        policy,
        backend,
        reported,
        interval_s=scaling.interval_s,
        on_change=on_change,
        roles=roles,
    )
