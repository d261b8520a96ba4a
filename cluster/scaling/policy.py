"""From what the pools need to how many workers they get. Pure, with a clock passed in.

A pool grows when its need has been above its size for a moment, and shrinks when its need has been
below the smaller size, with some room, for a time that grows with what the action costs: a worker
that takes a minute to start is kept ten minutes. While a budget of GPUs is used up, a worker goes
from one pool to the other if the one that gives is then much less strained than the one that takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cluster.scaling.needs import DecodeNeed, PoolNeed, PrefillNeed, RouterSample, WorkerSample
from protocol.ids import Role

#: PoolNeed must have been above the size for this share of a start's time, within these bounds.
_RISE_SHARE = 0.05
_RISE_BOUNDS_S = (1.0, 10.0)
#: A pool shrinks only if the smaller one would be filled to this share at most.
_SHRUNK_USE = 0.9
#: A worker changes pools if the pool that takes it is by this factor more strained.
_TRADE_GAIN = 1.3
#: For which the highest need of the pool that gives is taken over so many starts.
_TRADE_STARTS = 2.0
#: Assumed until a start was measured.
_START_S = 20.0
#: Needs a hair above a whole number are that number.
_ROUNDING = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Bounds of a pool's size. gpus: what one worker takes of the budget. fixed: the pool is not
    autoscaled; it only counts towards the budget."""

    min_replicas: int = 0
    max_replicas: int = 0
    gpus: float = 0.0
    fixed: bool = False

    def clamp(self, replicas: int) -> int:
        """The nearest size within the bounds."""
        return min(max(replicas, self.min_replicas), self.max_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """A pool at one moment. wanted: its size as it was last set, without the workers that are
    `leaving` and keep their GPUs until they have gone. pinned: an operator set the size."""

    wanted: int
    leaving: int = 0
    ready: tuple[WorkerSample, ...] = ()
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDecision:
    """The size that a pool should have, and why. `need` is the latest, `reason` is what made the
    size differ from `wanted`, or what the need is made of."""

    replicas: int
    need: float
    reason: str


class ScalingPolicy:
    """Both pools of a cluster. One object decides for as long as the cluster runs, or starts anew:
    it then waits before it shrinks anything."""

    def __init__(
        self,
        limits: Mapping[Role, PoolLimits],
        *,
        prefill: PrefillNeed,
        decode: DecodeNeed,
        keep_s: float,
        keep_starts: float = 10.0,
        gpus: float | None = None,
    ) -> None:
        """keep_s, keep_starts: a worker is kept so long once it was needed, and so many times what
        a start takes. gpus: budget of both pools; None: their bounds alone count."""
        self.limits = limits
        self._prefill = prefill
        self._decode = decode
        self._gpus = gpus
        self._pools = {role: _PoolHistory(keep_s, keep_starts) for role in Role}

    def decide(
        self, pools: Mapping[Role, PoolSample], routers: RouterSample, now: float
    ) -> dict[Role, PoolDecision]:
        """The sizes at `now`, with the sample of this moment. Call about once a second."""
        prefills, decodes = pools[Role.PREFILL].ready, pools[Role.DECODE].ready
        prefill = self._prefill.take(prefills, decodes, routers, now)
        decode = self._decode.take(decodes, routers)
        # Prompts that overload prefill reach decode once prefill has grown, and then at once.
        growth = self.limits[Role.PREFILL].max_replicas / max(1, len(prefills))
        growth = 1.0 if pools[Role.PREFILL].pinned else growth
        overload = max(1.0, min(prefill.overload, growth))
        if overload * decode.workers > len(decodes) >= decode.workers:
            reason = f"prefill holds {overload:.1f} times as much back; {decode.reason}"
            decode = replace(decode, workers=overload * decode.workers, reason=reason)
        needs = {Role.PREFILL: prefill, Role.DECODE: decode}
        decisions = {role: self._alone(role, pools[role], needs[role], now) for role in pools}
        return self._within_budget(pools, decisions)

    def _alone(self, role: Role, pool: PoolSample, need: PoolNeed, now: float) -> PoolDecision:
        """What a pool would have if there were no other."""
        limits, history = self.limits[role], self._pools[role]
        history.add(pool, need.workers, now)
        if pool.pinned or limits.fixed:
            return PoolDecision(replicas=pool.wanted, need=need.workers, reason=need.reason)
        rise, fall = history.risen_to(now), history.fallen_to(now)
        size = limits.clamp(rise if rise > pool.wanted else min(pool.wanted, fall))
        reason = need.reason
        if size < pool.wanted:
            most = limits.max_replicas
            reason = f"enough for {history.keep_s:.0f} s: {fall}"
            reason = f"max_replicas is {most}" if pool.wanted > most else reason
        elif rise > size:
            reason += f"; max_replicas is {size}"
        return PoolDecision(replicas=size, need=need.workers, reason=reason)

    def _within_budget(
        self, pools: Mapping[Role, PoolSample], decisions: dict[Role, PoolDecision]
    ) -> dict[Role, PoolDecision]:
        """Hold growth to the GPUs that are left; let a pool give one where it strains less."""
        if self._gpus is None:
            return decisions
        held = {role: pool.wanted + pool.leaving for role, pool in pools.items()}
        left = self._gpus - sum(size * self.limits[role].gpus for role, size in held.items())
        # The more strained pool first.
        for role in sorted(pools, key=lambda r: -_strain(decisions[r].need, pools[r].wanted)):
            decision, cost = decisions[role], self.limits[role].gpus
            growth = decision.replicas - pools[role].wanted
            if growth <= 0 or not cost:
                continue
            granted = min(growth, max(0, int(left / cost + _ROUNDING)))
            left -= granted * cost
            if granted == growth:
                continue
            reason = f"{decision.reason}; no more within the budget of {self._gpus:g} GPUs"
            decisions[role] = replace(
                decision, replicas=pools[role].wanted + granted, reason=reason
            )
            if not granted:
                self._trade(role, pools, decisions)
        return decisions

    def _trade(
        self, taker: Role, pools: Mapping[Role, PoolSample], decisions: dict[Role, PoolDecision]
    ) -> None:
        """Take one worker from the other pool if that is the lesser evil: the GPU goes to `taker`
        once it is free."""
        (giver,) = (role for role in Role if role is not taker)
        pool, limits = pools[giver], self.limits[giver]
        if pool.pinned or limits.fixed or pool.wanted <= limits.min_replicas:
            return
        if decisions[giver].replicas != pool.wanted:
            return
        strain = _strain(self._pools[giver].highest(_TRADE_STARTS), pool.wanted - 1)
        if _strain(decisions[taker].need, pools[taker].wanted) > _TRADE_GAIN * strain:
            decisions[giver] = replace(
                decisions[giver], replicas=pool.wanted - 1, reason=f"{taker} needs its GPU more"
            )


class _PoolHistory:
    """The latest needs of a pool, and how long its workers take to start."""

    def __init__(self, keep_s: float, keep_starts: float) -> None:
        self._least_keep_s = keep_s
        self._keep_starts = keep_starts
        self._needs: deque[tuple[float, float]] = deque()
        self._began = math.inf
        self._start_s = 0.0
        self._launches: deque[float] = deque()
        self._wanted = 0
        self._known: set[str] = set()

    @property
    def start_s(self) -> float:
        """What the latest start took."""
        return self._start_s or _START_S

    @property
    def keep_s(self) -> float:
        """How long a worker is kept after it was needed."""
        return max(self._least_keep_s, self._keep_starts * self._start_s)

    def add(self, pool: PoolSample, need: float, now: float) -> None:
        """The sample of this moment."""
        self._began = min(self._began, now)
        self._needs.append((now, need))
        while self._needs[0][0] < now - self.keep_s:
            self._needs.popleft()
        names = {worker.worker_id for worker in pool.ready}
        for _ in range(min(len(names - self._known), len(self._launches))):
            self._start_s = now - self._launches.popleft()
        if self._wanted:  # known before
            self._launches.extend([now] * (pool.wanted - self._wanted))
        for _ in range(min(self._wanted - pool.wanted, len(self._launches))):
            self._launches.pop()
        self._wanted = pool.wanted
        self._known = names

    def risen_to(self, now: float) -> int:
        """The size that the need of the last moment was never below."""
        low, high = _RISE_BOUNDS_S
        since = now - min(max(_RISE_SHARE * self.start_s, low), high)
        if self._began > since:
            return 0
        return _whole(min(need for at, need in self._needs if at >= since))

    def fallen_to(self, now: float) -> int:
        """The size that would have been enough, with some room, for as long as workers are kept."""
        if now - self._began < self.keep_s:
            return 1 << 30
        return _whole(self.highest() / _SHRUNK_USE)

    def highest(self, starts: float = math.inf) -> float:
        """The highest need while workers are kept, or in the last so many times of a start."""
        since = self._needs[-1][0] - starts * self.start_s
        return max(need for at, need in self._needs if at >= since)


def _strain(need: float, replicas: int) -> float:
    if replicas:
        return need / replicas
    return math.inf if need else 0.0


def _whole(need: float) -> int:
    return math.ceil(need - _ROUNDING)


def victims(workers: Iterable[WorkerSample], count: int) -> list[WorkerSample]:
    """The workers to end: those with the least in their caches, then with the least to do."""

    def worth(worker: WorkerSample) -> tuple[int, int, str]:
        load = worker.load
        return load.cached_blocks, load.running + load.waiting, worker.worker_id

    return sorted(workers, key=worth)[: max(0, count)]
