"""Who is in the cluster: a pure table with a clock passed in. The directory actor wraps it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from protocol.ids import Role, WorkerRef
from protocol.states import WORKER_TRANSITIONS, WorkerState

_REMEMBERED = 4096
_EVERYWHERE = frozenset({"0.0.0.0", "[::]"})


class MemberKind(StrEnum):
    """What a member of the cluster is."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One incarnation of one replica, as it describes itself.

    address: its control service (workers). http, grpc: its front doors, metrics: where it alone
    answers scrapes (routers). node: address of its machine.
    """

    name: str
    epoch: int
    kind: MemberKind
    state: WorkerState
    node: str = ""
    address: str = ""
    http: str = ""
    grpc: str = ""
    metrics: str = ""

    def ref(self) -> WorkerRef:
        """The worker, as routers address it."""
        return WorkerRef(
            worker_id=self.name, epoch=self.epoch, role=Role(self.kind), address=self.address
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The members at one version. Versions of different `incarnation`s do not compare."""

    incarnation: int
    version: int
    members: tuple[Member, ...] = ()

    def of(self, kind: MemberKind, *states: WorkerState) -> tuple[Member, ...]:
        """The members of a kind, in the given states or in any."""
        return tuple(
            m for m in self.members if m.kind is kind and (not states or m.state in states)
        )

    def ready_workers(self) -> tuple[WorkerRef, ...]:
        """The workers that take requests."""
        return tuple(
            member.ref()
            for kind in (MemberKind.PREFILL, MemberKind.DECODE)
            for member in self.of(kind, WorkerState.READY)
        )


def reachable(address: str, node: str) -> str:
    """`address` as others reach it: what listens on every interface is at its node."""
    host, _, port = address.rpartition(":")
    return f"{node if host in _EVERYWHERE else host}:{port}"


class Membership:
    """Members by name. `report` is idempotent and says by itself that a member lives.

    A member leaves by `leave`, by a newer incarnation of the same name, or by silence. Whoever left
    or was replaced never comes back with the same epoch; whoever was only silent does when it
    speaks again. A state never goes backwards within one epoch.
    """

    def __init__(self, *, incarnation: int, expiry_s: float) -> None:
        self._incarnation = incarnation
        self._expiry_s = expiry_s
        self._version = 0
        self._members: dict[str, Member] = {}
        self._heard: dict[str, float] = {}
        self._gone: OrderedDict[tuple[str, int], None] = OrderedDict()

    def view(self) -> View:
        """The table as it is."""
        members = sorted(self._members.values(), key=lambda m: (m.kind, m.name))
        return View(incarnation=self._incarnation, version=self._version, members=tuple(members))

    def report(self, member: Member, now: float) -> bool:
        """Take a member's word about itself; whether the view changed."""
        if (member.name, member.epoch) in self._gone:
            return False
        known = self._members.get(member.name)
        if known is not None and known.epoch != member.epoch:
            self._forget(known)
            known = None
        self._heard[member.name] = now
        if known is not None and not _may_follow(known.state, member.state):
            return False
        if known == member:
            return False
        self._members[member.name] = member
        self._version += 1
        return True

    def leave(self, name: str, epoch: int) -> bool:
        """A member says goodbye; whether the view changed."""
        self._bury(name, epoch)
        known = self._members.get(name)
        if known is None or known.epoch != epoch:
            return False
        self._remove(name)
        return True

    def expire(self, now: float) -> tuple[Member, ...]:
        """Take off whoever has been silent for too long."""
        silent = [n for n, heard in self._heard.items() if now - heard >= self._expiry_s]
        lost = tuple(self._members[name] for name in silent)
        for name in silent:
            self._remove(name)
        return lost

    def next_expiry(self, now: float) -> float:
        """Seconds until a member that stays silent would be taken off."""
        if not self._heard:
            return self._expiry_s
        return max(0.0, min(self._heard.values()) + self._expiry_s - now)

    def _forget(self, member: Member) -> None:
        self._bury(member.name, member.epoch)
        self._remove(member.name)

    def _remove(self, name: str) -> None:
        del self._members[name]
        del self._heard[name]
        self._version += 1

    def _bury(self, name: str, epoch: int) -> None:
        self._gone[name, epoch] = None
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)


class Attention:
    """Time as seen by who listens: at most `most_s` pass between two looks at the clock. A stall of
    this process, however long, is no silence of those who spoke meanwhile and are heard then."""

    def __init__(self, *, most_s: float) -> None:
        self.most_s = most_s
        self._time = 0.0
        self._looked = 0.0

    def time(self, now: float) -> float:
        """Seconds of attention, by a clock that says `now`."""
        self._time += min(now - self._looked, self.most_s)
        self._looked = now
        return self._time


class Following:
    """What a router makes of the views it gets: the workers to follow.

    A restarted directory starts empty. So after a change of incarnation the workers known before
    stay for `grace_s`, unless the new directory says otherwise about them.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._incarnation: int | None = None
        self._refs: tuple[WorkerRef, ...] = ()
        self._carried: tuple[WorkerRef, ...] = ()
        self._carried_until = 0.0

    def take(self, view: View, now: float) -> tuple[WorkerRef, ...]:
        """The workers to follow from now on."""
        if self._incarnation not in (None, view.incarnation):
            self._carried, self._carried_until = self._refs, now + self._grace_s
        self._incarnation = view.incarnation
        if now >= self._carried_until:
            self._carried = ()
        named = {member.name for member in view.members}
        kept = tuple(ref for ref in self._carried if ref.worker_id not in named)
        self._refs = view.ready_workers() + kept
        return self._refs


class Departures:
    """What a worker makes of the views it gets: which incarnations have left since the last one.

    A restarted directory starts empty: those known before have left only when they are not in its
    views after `grace_s`.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._incarnation: int | None = None
        self._epochs: frozenset[int] = frozenset()
        self._awaited_until = 0.0

    def take(self, view: View, now: float) -> frozenset[int]:
        """The epochs of the workers that have left."""
        if self._incarnation not in (None, view.incarnation):
            self._awaited_until = now + self._grace_s
        self._incarnation = view.incarnation
        there = frozenset(m.epoch for m in view.members if m.kind is not MemberKind.ROUTER)
        left = self._epochs - there if now >= self._awaited_until else frozenset[int]()
        self._epochs = (self._epochs | there) - left
        return left


def _may_follow(current: WorkerState, target: WorkerState) -> bool:
    return target is current or target in WORKER_TRANSITIONS[current]
