"""Cross-checks of a configuration, made before anything starts."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.config.schema import AUTO, ClusterConfig, NetworkSection, PoolSection
from engine.kv.sizing import available_memory, block_bytes, num_kv_blocks
from engine.model.config import ModelConfig
from engine.model.families import load_model_config
from engine.model.sharding import allowed_degrees
from engine.model.weight_files import check_weight_files
from kv_transfer.config import BackendName
from protocol.errors import BatonError, InvalidRequest
from protocol.ids import Role
from router.auth.keys import KeyFile
from router.auth.tls import Tls
from router.dispatch.telemetry import has_tracing
from router.text.chat_template import chosen_source
from router.text.tokenizer import ModelText

Bundle = Mapping[str, float]
GIB = 1 << 30


def check_config(
    config: ClusterConfig,
    model_path: Path,
    pool_models: Mapping[Role, Path] | None = None,
    *,
    free_memory: bool = True,
) -> None:
    """Raise InvalidRequest naming the first field that contradicts another or the model.
    `pool_models`: the checkpoint of each pool; None: all have `model_path`. free_memory: the KV
    pools must fit into the memory that is free now."""
    check_fields(config)
    model = _model("model.name", model_path)
    _check_length(config, model)
    for role in Role:
        _check_engine(config, role, model)
    _check_precision(config, model, pool_models or dict.fromkeys(Role, model_path))
    if config.ray.local and free_memory:
        _check_memory(config, model)


def check_fields(config: ClusterConfig) -> None:
    """What can be checked without the model, which may have to be fetched first."""
    if config.decode.replicas < 1:
        raise _refuse("decode.replicas", "must be at least 1: without decode nothing is served")
    _check_bounds(config)
    beat_s = max(config.pool(role).worker.heartbeat_s for role in Role)
    if config.router.settings.silence_s < 4 * beat_s:
        raise _refuse("router.settings.silence_s", f"must be at least 4 x heartbeat_s ({beat_s:g})")
    check_ports(config)
    if config.ray.local:  # elsewhere routers and workers have the files of their own machines
        _check_files(config)
        for role in Role:
            _check_disk(f"{role}.tiers.disk_path", config.pool(role).tiers.disk_path)
    check_devices(config, [role for role in Role if config.pool(role).replicas])


def check_folder(config: ClusterConfig, model_path: Path) -> None:
    """Raise InvalidRequest when workers or routers on this machine could not read the model's
    files, or lack an optional package."""
    settings = config.router.settings
    try:
        check_weight_files(model_path)
        ModelText(model_path, neutralise_control_tokens=False)
    except BatonError as error:
        raise _refuse("model.name", error.message) from error
    except (OSError, ValueError) as error:
        raise _refuse("model.name", str(error)) from error
    if settings.otlp_endpoint and not has_tracing():
        raise _refuse(
            "router.settings.otlp_endpoint",
            "needs the packages of the extra `tracing`",
        )


def _model(field: str, path: Path) -> ModelConfig:
    try:
        return load_model_config(path)
    except BatonError as error:
        raise _refuse(field, f"{path}: {error.message}") from error


def _check_precision(config: ClusterConfig, base: ModelConfig, paths: Mapping[Role, Path]) -> None:
    """Pools may hold one model in different precisions, if the configuration names a family."""
    weights = set()
    for role in Role:
        pool, path = config.pool(role), paths[role]
        field = f"{role}.model" if pool.model else "model.name"
        model = _model(field, path)
        if replace(model, quantization=None) != replace(base, quantization=None):
            raise _refuse(field, f"{path}: its config.json is that of another model")
        at_load = config.engine_config(role, path).quantization
        if at_load is not None and model.quantization is not None:
            raise _refuse(
                f"{role}.engine.quantization",
                f"{at_load} is for unquantised checkpoints; this one is quantised already "
                f"({model.quantization.describe()})",
            )
        if pool.replicas or pool.max_replicas:
            weights.add((path, at_load))
    if len(weights) > 1 and not config.model.kv_family:
        raise _refuse(
            "model.kv_family",
            "must name a family: the weights of the pools differ in precision, and each uses KV of "
            "the other",
        )


def warnings_of(config: ClusterConfig) -> list[str]:
    """What a user should know about a configuration that is allowed."""
    if not config.anonymous:
        return []
    return [
        f"network.host is {config.network.host} and router.settings.api_keys_file is empty: anyone "
        "who reaches the front ends can use the model; the Admin service is off"
    ]


def check_ports(config: ClusterConfig) -> None:
    """Raise InvalidRequest when the routers cannot all listen on the configured ports."""
    network, routers = config.network, config.router.replicas
    seen: dict[int, str] = {}
    for name in ("http_port", "grpc_port", "metrics_port"):
        port = getattr(network, name)
        if port and port in seen:  # the sockets would share it, as those of two routers do
            raise _refuse(f"network.{name}", f"is the same as network.{seen[port]} ({port})")
        seen[port] = name
    if routers == 1:
        return
    for name in ("http_port", "grpc_port"):
        if getattr(network, name) == 0:
            message = "must be given when router.replicas is more than 1: they share it"
            raise _refuse(f"network.{name}", message)
    if network.metrics_port and config.ray.local:
        raise _refuse("network.metrics_port", "must be 0 when one machine has more than one router")
    if not config.router.settings.reuse_port:
        raise _refuse(
            "router.settings.reuse_port", "must be true when router.replicas is more than 1"
        )


def _check_bounds(config: ClusterConfig) -> None:
    """The bounds of autoscaled pools, and the budget that they share."""
    if config.scaling.roles and config.autoscaled:
        raise _refuse(
            "scaling.roles",
            f"needs pools that keep their size, but {config.autoscaled[0]}.max_replicas is set",
        )
    follows = config.scaling.roles or Role.DECODE in config.autoscaled
    if follows and config.decode.min_replicas < 1:
        raise _refuse("decode.min_replicas", "must be at least 1: decode serves every request")
    for role in config.autoscaled:
        pool = config.pool(role)
        if not pool.min_replicas <= pool.replicas <= (pool.max_replicas or 0):
            raise _refuse(
                f"{role}.replicas",
                f"must be between min_replicas ({pool.min_replicas}) and max_replicas "
                f"({pool.max_replicas}), got {pool.replicas}",
            )
    sizes = {role: config.pool(role).replicas for role in Role}
    gpus = sum(size * config.gpus_of(role) for role, size in sizes.items())
    if config.autoscaled and config.scaling.gpus is not None and gpus > config.scaling.gpus:
        raise _refuse(
            "scaling.gpus", f"is {config.scaling.gpus:g}, but the pools begin on {gpus:g}"
        )


def _check_files(config: ClusterConfig) -> None:
    """The files that routers read when they start."""
    settings = config.router.settings
    try:
        Tls(settings.tls)
        KeyFile(settings.api_keys_file, tiers=frozenset(settings.service_tiers))
        if settings.chat_template:
            chosen_source(settings.chat_template)
    except ValueError as error:
        name, _, fault = str(error).partition(" ")
        raise _refuse(f"router.settings.{name}", fault) from None


def _check_disk(field: str, path: str) -> None:
    """A folder for KV that is there, or can be made."""
    if not path:
        return
    try:
        present = next(each for each in (Path(path), *Path(path).parents) if each.exists())
        if not present.is_dir() or not os.access(present, os.W_OK):
            raise _refuse(field, f"{present} is not a folder that can be written to")
    except OSError as error:
        raise _refuse(field, str(error)) from None


def _check_length(config: ClusterConfig, model: ModelConfig) -> None:
    length, limit = config.model.max_model_len, model.max_position_embeddings
    if length is not None and not 2 <= length <= limit:
        message = f"must be at least 2 and at most the model's {limit}, got {length}"
        raise _refuse("model.max_model_len", message)


def _check_engine(config: ClusterConfig, role: Role, model: ModelConfig) -> None:
    try:
        config.engine_config(role, Path(config.model.name))
    except BatonError as error:  # the engine's check of the fields that derive from `model`
        raise _refuse(f"model.{error.param}", error.message) from error
    allowed, degree = allowed_degrees(model), config.pool(role).engine.tp_size
    if degree not in allowed:
        raise _refuse(
            f"{role}.engine.tp_size",
            f"{degree} does not suit {model.num_heads} query and {model.num_kv_heads} KV heads; "
            f"allowed: {', '.join(map(str, allowed))}",
        )


def _check_memory(config: ClusterConfig, model: ModelConfig) -> None:
    """The CPU workers' KV pools must fit into the memory that is available now."""
    needs = {role: _kv_bytes(config, role, model) for role in Role}
    needed, available = sum(needs.values()), available_memory()
    if needed > available:
        raise _refuse(
            f"{max(needs, key=needs.__getitem__)}.engine.kv_memory_bytes",
            f"all KV pools together take {needed / GIB:.1f} GiB, but this machine has "
            f"{available / GIB:.1f} GiB of memory available",
        )


def _kv_bytes(config: ClusterConfig, role: Role, model: ModelConfig) -> int:
    """Bytes of a role's KV pools on CPUs; 0 where the workers size them by the free memory."""
    pool, engine = config.pool(role), config.engine_config(role, Path(config.model.name))
    if engine.device != "cpu" or engine.num_blocks is engine.kv_memory_bytes is None:
        return 0
    try:
        blocks = num_kv_blocks(engine, model)
    except BatonError as error:
        raise _refuse(f"{role}.engine.{error.param}", error.message) from error
    replicas = max(pool.replicas, pool.max_replicas or 0)
    return replicas * engine.tp_size * blocks * block_bytes(engine, model)


def check_devices(config: ClusterConfig, roles: Sequence[Role] = tuple(Role)) -> None:
    """Raise InvalidRequest when the pools of these roles have unsuitable devices, or devices
    between which KV cannot be transferred."""
    for role in roles:
        _check_device(config.pool(role), role.value, config.transfer.backend)
    devices = {role: config.pool(role).engine.device for role in roles}
    if len(set(devices.values())) > 1:
        raise _refuse(
            "prefill.engine.device",
            f"is {devices[Role.PREFILL]!r}, but decode.engine.device is "
            f"{devices[Role.DECODE]!r}: KV is handed over between devices of one kind",
        )


def _check_device(pool: PoolSection, role: str, backend: BackendName) -> None:
    device, gpus = pool.engine.device, pool.placement.gpus
    if device not in ("cpu", "cuda"):
        raise _refuse(
            f"{role}.engine.device", f"must be 'cpu' or 'cuda' (Ray picks the GPU), got {device!r}"
        )
    if device == "cuda":
        if not 0 < gpus <= 1:
            raise _refuse(
                f"{role}.placement.gpus",
                f"must be 1 for each rank on device cuda, or the share of one, got {gpus}",
            )
        if gpus < 1 and pool.engine.kv_memory_bytes is None and pool.engine.num_blocks is None:
            raise _refuse(
                f"{role}.engine.kv_memory_bytes",
                f"must be set where workers share a GPU (placement.gpus is {gpus}): the first "
                "would take all free memory",
            )
        unusable, needed = {BackendName.TCP}, "CPUs"
    else:
        unusable, needed = {BackendName.NCCL, BackendName.CUDA_IPC}, "GPUs"
    if backend in unusable:
        raise _refuse(
            "transfer.backend", f"{backend} needs {needed}, but {role}.engine.device is {device!r}"
        )
    if device == "cpu" and gpus:
        raise _refuse(f"{role}.placement.gpus", f"is {gpus}, but the device is {device!r}")


def check_listening(network: NetworkSection) -> None:
    """Raise InvalidRequest when this machine cannot listen where routers and workers are to.

    Routers share their ports with SO_REUSEPORT and would share another cluster's, too, so a port in
    use is an error here.
    """
    _check_bind("host", network.host, 0)
    for name in ("http_port", "grpc_port", "metrics_port"):
        _check_bind(name, network.host, getattr(network, name))
    if network.worker_host != AUTO:
        _check_bind("worker_host", network.worker_host.strip("[]"), 0)


def _check_bind(name: str, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, TypeError) as error:  # TypeError: the host cannot be a name
        fault = getattr(error, "strerror", None) or error
        raise _refuse(f"network.{name}", f"cannot listen on {host}:{port}: {fault}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one machine offers now."""

    resources: Bundle
    labels: Mapping[str, str] = field(default_factory=dict)

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(self.labels.get(name) == value for name, value in labels.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A pool's demand: for each of `replicas`, all `bundles` on one node with `labels`."""

    pool: str
    replicas: int
    bundles: tuple[Bundle, ...]
    labels: Mapping[str, str] = field(default_factory=dict)

    def total(self) -> Bundle:
        """What one replica needs, summed over its ranks."""
        total: Counter[str] = Counter()
        for bundle in self.bundles:
            total.update(bundle)
        return total


def demands_of(config: ClusterConfig) -> tuple[Demand, ...]:
    router = config.router
    pools = [("router", router.replicas, router.placement, 1)]
    for role in Role:
        pool = config.pool(role)
        pools.append((role.value, pool.replicas, pool.placement, pool.engine.tp_size))
    return tuple(
        Demand(
            pool=name,
            replicas=replicas,
            bundles=(placement.bundle(),) * ranks,
            labels=placement.labels,
        )
        for name, replicas, placement, ranks in pools
    )


def check_resources(demands: Sequence[Demand], nodes: Sequence[Node]) -> None:
    """Raise InvalidRequest, with demand and supply, when the replicas cannot all be placed.

    Places the replicas that the fewest nodes could hold first, of those the largest, each on the
    fullest node with room, which keeps whole nodes for other large ones.
    """
    free = [(node, dict(node.resources)) for node in nodes]
    placed = Counter[str]()

    def order(demand: Demand) -> tuple[int, float]:
        need = demand.total()
        able = [n for n in nodes if n.matches(demand.labels) and _holds(n.resources, need)]
        return len(able), -sum(need.values())

    for demand in (d for d in sorted(demands, key=order) for _ in range(d.replicas)):
        need = demand.total()
        offers = [left for node, left in free if node.matches(demand.labels)]
        fits = [left for left in offers if _holds(left, need)]
        if not fits:
            message = _shortage(demand, placed[demand.pool] + 1, demands, nodes)
            if all(sum(left.get(k, 0.0) for left in offers) >= v for k, v in need.items()):
                message += "\n  there is enough left in total, but not on one node: fragmented"
            raise _refuse(f"{demand.pool}.replicas", message)
        best = min(fits, key=lambda left: sum(left.get(name, 0.0) for name in need))
        for name, amount in need.items():
            best[name] -= amount
        placed[demand.pool] += 1


def _holds(offer: Bundle, need: Bundle) -> bool:
    """Whether the offer covers the need, in ten-thousandths as Ray counts."""
    return all(round(offer.get(name, 0.0) - amount, 4) >= 0 for name, amount in need.items())


def _shortage(demand: Demand, number: int, demands: Sequence[Demand], nodes: Sequence[Node]) -> str:
    need = demand.total()
    labels = "".join(f" labelled {name}={value}" for name, value in demand.labels.items())
    wanted = [f"{d.pool} {d.replicas} x {_amounts(d.total())}" for d in demands if d.replicas]
    offers = [
        " ".join(
            [f"node {i}: {_amounts(node.resources, need)}"]
            + [f"{name}={node.labels.get(name, 'none')}" for name in demand.labels]
        )
        for i, node in enumerate(nodes)
    ]
    return (
        f"replica {number} of {demand.replicas} finds no node{labels} with {_amounts(need)} free "
        f"on it ({len(demand.bundles)} rank(s) that must share a node)\n"
        f"  demand: {'; '.join(wanted)}\n"
        f"  supply: {'; '.join(offers)}"
    )


def _amounts(amounts: Bundle, names: Mapping[str, float] | None = None) -> str:
    names = amounts if names is None else names
    return ", ".join(f"{name} {amounts.get(name, 0.0):g}" for name in names) or "nothing"


def _refuse(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {message}", param=path)
