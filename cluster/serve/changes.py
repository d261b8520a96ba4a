"""What a changed configuration, model or version changes in a running cluster: pure, but for the
stamps of the model's files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from cluster.config.load import leaf_paths
from cluster.config.schema import ClusterConfig
from cluster.membership.table import Pool, cluster_protocol
from protocol.errors import InvalidRequest
from protocol.ids import Role
from router.fingerprint import baton_build, text_fingerprint

WORKERS = frozenset({Pool.PREFILL, Pool.DECODE})
ALL = frozenset(Pool)
#: Changes travel in this order: decode computes prompts itself while prefill has nothing for it,
#: and routers come last because they follow what the workers say of themselves.
ORDER = (Pool.PREFILL, Pool.DECODE, Pool.ROUTER)
_SIZES = ("replicas", "min_replicas", "max_replicas")
#: Read by the directory or the command line alone, each time.
_LIVE = frozenset({"ray.autoscaling", "lifecycle.start_timeout_s"})
_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """What a pool was deployed with.

    fields: every settable field by path. build, protocol: of Baton. weights: stamp of the weight
    files of the pool's model; text, tokenizer: digests of what routers read of it.
    """

    fields: dict[str, Any]
    build: str
    protocol: str
    weights: str
    text: str
    tokenizer: str

    def revision(self, pool: Pool) -> str:
        """Of the pool's replicas: another one when they have to be replaced."""
        own = {path: value for path, value in self.fields.items() if pool in affected(path)}
        model = self.weights if pool in WORKERS else self.text
        digest = sha256(json.dumps([own, model], sort_keys=True, default=str).encode())
        return f"{self.build}/{digest.hexdigest()[:8]}"

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, text: bytes | None) -> Deployed | None:
        """None for a record that is missing, or of a version that kept others."""
        try:
            return None if text is None else msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError:
            return None


def describe(config: ClusterConfig, pool: Pool, folder: Path) -> Deployed:
    """What a pool would be deployed with now; `folder`: of its model."""
    fields = {path: attrgetter(path)(config) for path in leaf_paths()}
    tokenizer = folder / "tokenizer.json"
    return Deployed(
        fields=json.loads(msgspec.json.encode(fields)),
        build=baton_build(),
        protocol=cluster_protocol(),
        weights=weights_stamp(folder) if pool in WORKERS else "",
        text=text_fingerprint(folder, config.router.settings.chat_template),
        tokenizer=sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else "",
    )


def weights_stamp(folder: Path) -> str:
    """Of names, sizes and times of the files: the contents may be hundreds of gigabytes."""
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    rows = [(f.name, s.st_size, s.st_mtime_ns) for f in files if f.exists() for s in (f.stat(),)]
    return sha256(repr(rows).encode()).hexdigest()[:16]


def affected(path: str) -> frozenset[Pool]:
    """The pools whose replicas are built from a field, and have to be replaced when it changes."""
    section, _, rest = path.partition(".")
    if section == "scaling" or rest in _SIZES or path in _LIVE:
        return frozenset()
    if section == "router" or path in ("model.served_name", "model.aliases"):
        return frozenset({Pool.ROUTER})
    if section == "network":
        if rest == "worker_ports":
            return ALL
        return WORKERS if rest == "worker_host" else frozenset({Pool.ROUTER})
    if section == "lifecycle" or path in ("model.name", "model.max_model_len"):
        return ALL
    if section in ("model", "transfer") or rest.startswith("worker."):
        return WORKERS  # a worker that changes its role has the other pool's settings
    return frozenset({Pool(section)}) if section in tuple(Pool) else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChange:
    """What happens to one pool. reasons: why its replicas are replaced; empty: they stay.
    replicas: its size from now on; before: its size now."""

    pool: Pool
    reasons: tuple[str, ...]
    before: int
    replicas: int

    def lines(self) -> Iterator[str]:
        """In words."""
        if self.reasons and self.before:
            yield f"{self.pool}: {self.before} replaced, one after another, because of"
            yield from (f"  {reason}" for reason in self.reasons)
        if self.replicas != self.before:
            yield f"{self.pool}: from {self.before} to {self.replicas} replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Everything that a new configuration changes. live: fields that take effect without replacing
    a replica."""

    pools: tuple[PoolChange, ...]
    live: tuple[str, ...]

    def lines(self) -> list[str]:
        """What will be done, in words; empty for nothing."""
        found = [line for pool in self.pools for line in pool.lines()]
        return found + [f"at once: {line}" for line in self.live]


def plan_change(
    before: Mapping[Pool, Deployed | None],
    after: Mapping[Pool, Deployed],
    sizes: Mapping[Pool, int],
) -> Change:
    """What changes from what the pools were deployed with; `sizes`: the replicas that each has.

    Raises InvalidRequest, naming the field, when the cluster cannot be changed so while it serves:
    another Ray, messages that the running processes do not understand, another tokenizer.
    """
    pools, live = [], {}
    for pool in ORDER:
        old, new, size = before.get(pool), after[pool], sizes.get(pool, 0)
        changed = _differences(old, new)
        for path, text in changed.items():
            if path.startswith("ray.") and path not in _LIVE:
                _refuse(path, f"cannot change while the cluster runs ({text})")
            if not affected(path) and path.partition(".")[2] != "replicas":
                live[path] = text
        if old is not None and size:
            _check_compatible(old, new)
        replaced = old is None or old.revision(pool) != new.revision(pool)
        reasons = tuple(_reasons(pool, old, new, changed)) if replaced and size else ()
        resized = f"{pool}.replicas" in changed or not size
        wanted = int(new.fields[f"{pool}.replicas"]) if resized else size
        pools.append(PoolChange(pool=pool, reasons=reasons, before=size, replicas=wanted))
    return Change(pools=tuple(pools), live=tuple(live.values()))


def _differences(old: Deployed | None, new: Deployed) -> dict[str, str]:
    """The fields that differ, each in words."""
    if old is None:
        return {}
    return {
        path: f"{path}: {_shown(old.fields.get(path))} -> {_shown(new.fields.get(path))}"
        for path in sorted(old.fields.keys() | new.fields.keys())
        if old.fields.get(path) != new.fields.get(path)
    }


def _reasons(
    pool: Pool, old: Deployed | None, new: Deployed, changed: Mapping[str, str]
) -> Iterator[str]:
    if old is None:
        yield "a deployment that is not known: by another version, or by other means"
        return
    if old.build != new.build:
        yield f"Baton: {old.build} -> {new.build}"
    yield from (text for path, text in changed.items() if pool in affected(path))
    named = {"model.name", f"{pool}.model"} & changed.keys()
    if pool in WORKERS and old.weights != new.weights and not named:
        yield "model.name: the files of the weights have changed"
    if pool is Pool.ROUTER and old.text != new.text and not named:
        yield "model.name: tokenizer, template or configuration of the model have changed"


def _check_compatible(old: Deployed, new: Deployed) -> None:
    if old.protocol != new.protocol:
        raise InvalidRequest(
            f"the cluster runs Baton {old.build} and this is {new.build}: their messages differ "
            f"(protocol {old.protocol} and {new.protocol}), so their processes cannot serve "
            "together. Start a second cluster beside it, or `baton down` and `baton up`",
            param="version",
        )
    if old.tokenizer != new.tokenizer:
        _refuse("model.name", "has another tokenizer: running requests could not go on with it")


def _refuse(path: str, message: str) -> None:
    raise InvalidRequest(
        f"{path}: {message}. Start a second cluster beside it, or `baton down` and `baton up`",
        param=path,
    )


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def pool_models(config: ClusterConfig) -> dict[Pool, str]:
    """The model of each pool, by name or folder."""
    own = {Pool(role): config.model_name(role) for role in Role}
    return own | {Pool.ROUTER: config.model.name}
