"""Which replicas are in the cluster: pure state with a clock passed in."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from itertools import islice
from typing import Any

import msgspec

from concurrency.bounded_map import BoundedMap
from protocol.codec import decode, encode
from protocol.ids import Role, WorkerRef
from protocol.message import Message
from protocol.states import WORKER_TRANSITIONS, WorkerState
from router.admin import PoolSize
from rpc.methods import protocol_digest

_MAX_DEPARTED = 4096
_MAX_CHANGES = 4096
_SIZES = ""  # in place of a name: the sizes have changed
_MIN_MASS = 3
_MASS_EXPIRY = 10
_ALL_INTERFACES = frozenset({"0.0.0.0", "[::]"})


class Pool(StrEnum):
    """The pool that a replica belongs to."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


class _Told(Message):
    """Pickled as the bytes of its message: for a view of a thousand, Ray takes thirty times as long
    otherwise."""

    def __reduce__(self) -> tuple[Any, ...]:
        return decode, (type(self), encode(self))


class Replica(_Told):
    """One incarnation of one replica, as it reports itself.

    role: that a worker has now; None: that of its pool. node: address of its machine. address: of
    its control methods. process: of a worker (protocol.ids.WorkerRef). http, grpc: a router's front
    ends; metrics: where that router alone serves its metrics. revision: of Baton, configuration and
    model (cluster.serve.changes). protocol: `cluster_protocol`.
    """

    name: str
    epoch: int
    pool: Pool
    role: Role | None = None
    node: str = ""
    address: str = ""
    process: str = ""
    http: str = ""
    grpc: str = ""
    metrics: str = ""
    revision: str = ""
    protocol: str = msgspec.field(default_factory=lambda: cluster_protocol())
    state: WorkerState

    def ref(self) -> WorkerRef:
        return WorkerRef(
            worker_id=self.name,
            epoch=self.epoch,
            role=self.role or Role(self.pool),
            address=self.address,
            process=self.process,
        )


class View(_Told):
    """The replicas at one version. Versions of different `incarnation`s do not compare."""

    replicas: tuple[Replica, ...] = ()
    sizes: tuple[PoolSize, ...] = ()  # of autoscaled pools
    incarnation: int
    version: int

    def of(self, pool: Pool, *states: WorkerState) -> tuple[Replica, ...]:
        """The replicas of a pool, in the given states or in any."""
        return tuple(
            r for r in self.replicas if r.pool is pool and (not states or r.state in states)
        )

    def workers(self) -> tuple[Replica, ...]:
        return tuple(r for r in self.replicas if r.pool is not Pool.ROUTER)

    def understood(self, protocol: str) -> View:
        """Without the replicas whose messages are of another protocol."""
        own = tuple(r for r in self.replicas if r.protocol == protocol)
        return msgspec.structs.replace(self, replicas=own)

    def ready_workers(self) -> tuple[WorkerRef, ...]:
        """The workers that accept requests, those that prefill first."""
        ready = [r.ref() for r in self.workers() if r.state is WorkerState.READY]
        return tuple(sorted(ready, key=lambda ref: ref.role is Role.DECODE))


class ViewChange(_Told):
    """What differs in the view of `version` from an earlier one of the same incarnation."""

    incarnation: int
    version: int
    replicas: tuple[Replica, ...]  # new or changed
    gone: tuple[str, ...]
    sizes: tuple[PoolSize, ...]

    def applied(self, before: View) -> View:
        """The later view."""
        replicas = {replica.name: replica for replica in before.replicas}
        for name in self.gone:
            replicas.pop(name, None)
        replicas |= {replica.name: replica for replica in self.replicas}
        return View(
            incarnation=self.incarnation,
            version=self.version,
            replicas=tuple(sorted(replicas.values(), key=_order)),
            sizes=self.sizes,
        )


def cluster_protocol() -> str:
    """The protocol of this process, the directory's included."""
    return protocol_digest(Replica, View, ViewChange)


def _order(replica: Replica) -> tuple[str, str]:
    return replica.pool, replica.name


def reachable(address: str, node: str) -> str:
    """`address` for other machines: that of its node where it listens on all interfaces."""
    host, _, port = address.rpartition(":")
    return f"{node if host in _ALL_INTERFACES else host}:{port}"


class ReplicaTable:
    """The replicas by name. A report is idempotent and doubles as a heartbeat.

    A replica leaves by `leave`, by a newer epoch of the same name, or by expiry. After the first
    two its epoch never returns; after expiry its next report brings it back. Within one epoch a
    state never goes backwards.
    """

    def __init__(self, *, incarnation: int, expiry_s: float) -> None:
        self._incarnation = incarnation
        self._expiry_s = expiry_s
        self._version = 0
        self._replicas: dict[str, Replica] = {}
        self._reported: dict[str, float] = {}
        self._sizes: tuple[PoolSize, ...] = ()
        self._changed: deque[str] = deque(maxlen=_MAX_CHANGES)  # the name in each version
        self._departed: BoundedMap[tuple[str, int], bool] = BoundedMap(_MAX_DEPARTED)

    def view(self) -> View:
        replicas = sorted(self._replicas.values(), key=_order)
        return View(
            incarnation=self._incarnation,
            version=self._version,
            replicas=tuple(replicas),
            sizes=self._sizes,
        )

    def change(self, incarnation: int, version: int) -> ViewChange | None:
        """What has changed since a version; None when that is too long ago to know."""
        count = self._version - version
        if incarnation != self._incarnation or not 0 <= count <= len(self._changed):
            return None
        names = set(islice(reversed(self._changed), count)) - {_SIZES}
        present = self._replicas.keys() & names
        return ViewChange(
            incarnation=incarnation,
            version=self._version,
            replicas=tuple(self._replicas[name] for name in present),
            gone=tuple(names - present),
            sizes=self._sizes,
        )

    def is_at(self, incarnation: int, version: int) -> bool:
        """Whether nothing has changed since."""
        return (incarnation, version) == (self._incarnation, self._version)

    def _next_version(self, name: str) -> None:
        self._version += 1
        self._changed.append(name)

    def resize(self, sizes: tuple[PoolSize, ...]) -> None:
        """The sizes that autoscaled pools should have."""
        self._sizes = sizes
        self._next_version(_SIZES)

    def report(self, replica: Replica, now: float) -> bool:
        """Record a replica's report; whether the view changed."""
        if (replica.name, replica.epoch) in self._departed:
            return False
        known = self._replicas.get(replica.name)
        if known is not None and known.epoch != replica.epoch:
            self.leave(known.name, known.epoch)
            known = None
        self._reported[replica.name] = now
        if known is not None and (known == replica or not _may_follow(known.state, replica.state)):
            return False
        self._replicas[replica.name] = replica
        self._next_version(replica.name)
        return True

    def leave(self, name: str, epoch: int) -> bool:
        """Remove a replica that has stopped, for good; whether the view changed."""
        self._departed.put((name, epoch), True)
        known = self._replicas.get(name)
        if known is None or known.epoch != epoch:
            return False
        self._remove(name)
        return True

    def expire(self, now: float) -> tuple[Replica, ...]:
        """Remove, and return, the replicas without a report for `expiry_s`.

        When most replicas expire at once, their reports are lost more likely than they are, and
        their removal would abort every hand-off: they stay for `_MASS_EXPIRY` times as long.
        """
        limit_s = self._expiry_s
        silent = sum(now - at >= limit_s for at in self._reported.values())
        if silent >= _MIN_MASS and 2 * silent > len(self._reported):
            limit_s *= _MASS_EXPIRY
        expired = [n for n, at in self._reported.items() if now - at >= limit_s]
        return tuple(self._remove(name) for name in expired)

    def next_expiry(self, now: float) -> float:
        """Seconds until the next replica exceeds `expiry_s` without a further report."""
        left = [at + self._expiry_s - now for at in self._reported.values()]
        return min((s for s in left if s > 0), default=self._expiry_s)

    def _remove(self, name: str) -> Replica:
        del self._reported[name]
        self._next_version(name)
        return self._replicas.pop(name)


def _may_follow(current: WorkerState, target: WorkerState) -> bool:
    return target is current or target in WORKER_TRANSITIONS[current]


class BoundedClock:
    """Monotonic time that advances by at most `max_step_s` between two readings.

    A stall of this process thus counts as one step, and the reports that arrived meanwhile are
    handled before their senders expire.
    """

    def __init__(self, *, max_step_s: float) -> None:
        self.max_step_s = max_step_s
        self._time = 0.0
        self._read = 0.0

    def time(self, now: float) -> float:
        """The bounded time when the real clock shows `now`."""
        self._time += min(now - self._read, self.max_step_s)
        self._read = now
        return self._time


class RestartGrace:
    """Completes the views of a restarted directory, which begins empty: for `grace_s` the replicas
    known before the restart stay, unless a new view names them."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._last: View | None = None
        self._carried: tuple[Replica, ...] = ()
        self._until = 0.0

    def complete(self, view: View, now: float) -> View:
        """`view` with the replicas that stay."""
        if self._last is not None and self._last.incarnation != view.incarnation:
            self._carried, self._until = self._last.replicas, now + self._grace_s
        if now >= self._until:
            self._carried = ()
        named = {replica.name for replica in view.replicas}
        kept = tuple(replica for replica in self._carried if replica.name not in named)
        self._last = msgspec.structs.replace(view, replicas=view.replicas + kept)
        return self._last
