"""Which worker takes another role when the load turns. Pure, with a clock passed in.

The number of workers stays; the split between prefill and decode follows what the load takes. A
change costs: streams move, caches lie on the wrong worker. So the loss of the present split against
the next one is added up, and a worker changes once that sum has reached the cost of a change: a
load that only flickers changes nothing, and a load that turns is followed after a loss of about the
cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.scaling.needs import PoolNeed, WorkerSample
from protocol.ids import Role

#: A role without workers, or one that is far too small, counts for so much.
_MAX_STRAIN = 5.0
#: Seconds between two looks that count at most: what came between is not known.
_MAX_STEP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """Have a worker take a role, and why."""

    worker_id: str
    role: Role
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """The split at one moment, for people. need: workers that the load takes in each role."""

    workers: Mapping[Role, int]
    need: Mapping[Role, float]
    reason: str


class RolePolicy:
    """Decides for one cluster. min_workers: those that each role keeps. cost_s: what a change
    costs, as seconds for which one pool has twice the load that it can bear."""

    def __init__(self, min_workers: Mapping[Role, int], *, cost_s: float) -> None:
        self._min_workers = min_workers
        self._cost_s = cost_s
        self._regret = dict.fromkeys(Role, 0.0)  # for not having given a worker to this role
        self._at: float | None = None
        self.view: RoleView | None = None

    def decide(
        self,
        workers: Mapping[Role, Sequence[WorkerSample]],
        needs: Mapping[Role, PoolNeed],
        now: float,
    ) -> RoleChange | None:
        """The change that is due at `now`, if any. Call about once a second, with the ready workers
        by the role that they have."""
        step_s = 0.0 if self._at is None else min(max(0.0, now - self._at), _MAX_STEP_S)
        self._at = now
        sizes = {role: len(workers[role]) for role in Role}
        loss = _loss(sizes, needs)
        for taker in Role:
            after = _moved(sizes, taker)
            possible = after[_other(taker)] >= self._min_workers[_other(taker)]
            gain = loss - _loss(after, needs) if possible else 0.0
            self._regret[taker] = max(0.0, self._regret[taker] + step_s * gain) if possible else 0.0
        taker = max(Role, key=self._regret.__getitem__)
        due = self._regret[taker] >= self._cost_s
        self.view = RoleView(
            workers=sizes,
            need={role: needs[role].workers for role in Role},
            reason=self._reason(taker, loss, needs),
        )
        if not due:
            return None
        self._regret = dict.fromkeys(Role, 0.0)
        giver = _other(taker)
        chosen = min(workers[giver], key=_worth)
        reason = (
            f"{taker} needs {needs[taker].workers:.1f} workers and has {sizes[taker]}, "
            f"{giver} {needs[giver].workers:.1f} and has {sizes[giver]}: {needs[taker].reason}"
        )
        return RoleChange(worker_id=chosen.worker_id, role=taker, reason=reason)

    def _reason(self, taker: Role, loss: float, needs: Mapping[Role, PoolNeed]) -> str:
        if loss <= 0.0:
            return "no role lacks workers"
        strained = max(Role, key=lambda role: needs[role].workers)
        if self._regret[taker] <= 0.0:
            return f"no other split would be better: {needs[strained].reason}"
        share = 100 * self._regret[taker] / self._cost_s
        return f"{taker} lacks workers, for {share:.0f} % of what a change costs so far"


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def _moved(sizes: Mapping[Role, int], taker: Role) -> dict[Role, int]:
    return {role: size + (1 if role is taker else -1) for role, size in sizes.items()}


def _loss(sizes: Mapping[Role, int], needs: Mapping[Role, PoolNeed]) -> float:
    """By how much the load exceeds what the roles can bear; 0 where each has enough."""
    return sum(max(0.0, _strain(needs[role].workers, sizes[role]) - 1.0) for role in Role)


def _strain(need: float, size: int) -> float:
    if size <= 0:
        return _MAX_STRAIN if need > 0.0 else 0.0
    return min(_MAX_STRAIN, need / size)


def _worth(worker: WorkerSample) -> tuple[int, int, str]:
    """What a worker would give up with its role: least first."""
    load = worker.load
    return load.running + load.waiting, load.held_blocks, worker.worker_id
