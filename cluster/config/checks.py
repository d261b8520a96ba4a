"""Cross-checks of a configuration, made before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.config.schema import AUTO, ClusterConfig, NetworkSection, PoolSection
from engine.model.config import ModelConfig
from engine.model.sharding import allowed_degrees
from kv_transfer.config import BackendName
from protocol.errors import BatonError, InvalidRequest
from protocol.ids import Role
from router.auth.key_file import KeyFile
from router.auth.tls import Tls
from router.text.chat import chosen_source

Bundle = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one machine offers now."""

    resources: Bundle
    labels: Mapping[str, str] = field(default_factory=dict)

    def carries(self, labels: Mapping[str, str]) -> bool:
        """Whether it has all of these labels."""
        return all(self.labels.get(name) == value for name, value in labels.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A pool's wish: `replicas` groups, the `bundles` of each on one node that has `labels`."""

    pool: str
    replicas: int
    bundles: tuple[Bundle, ...]
    labels: Mapping[str, str] = field(default_factory=dict)

    def total(self) -> dict[str, float]:
        """What one replica needs, summed over its ranks."""
        total: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0.0) + amount
        return total


def check_config(config: ClusterConfig, model_path: Path) -> None:
    """Raise InvalidRequest naming the first field at odds with another or with the model."""
    try:
        model = ModelConfig.load(model_path)
    except BatonError as error:
        raise _refuse("model.name", f"{model_path}: {error.message}") from error
    if config.decode.replicas < 1:
        raise _refuse("decode.replicas", "must be at least 1: without decode nothing is served")
    check_ports(config)
    if config.ray.local:  # elsewhere the routers' machines have files of their own
        _check_files(config)
    _check_length(config, model)
    for role in Role:
        _check_pool(config, role, model)
    check_devices(config, [role for role in Role if config.pool(role).replicas])


def check_doors(network: NetworkSection) -> None:
    """Raise InvalidRequest when this machine, on which all is to run, cannot listen somewhere: at a
    front door, or where workers do. Routers share their ports, so they would share them with those
    of another cluster, too."""
    _check_listening("host", network.host, 0)
    for name in ("http_port", "grpc_port", "metrics_port"):
        _check_listening(name, network.host, getattr(network, name))
    if network.worker_host != AUTO:
        _check_listening("worker_host", network.worker_host.strip("[]"), 0)


def _check_listening(name: str, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, TypeError) as error:  # the latter for what can be no name
        fault = getattr(error, "strerror", None) or error
        raise _refuse(f"network.{name}", f"cannot listen on {host}:{port}: {fault}") from None


def check_resources(demands: Sequence[Demand], nodes: Sequence[Node]) -> None:
    """Raise InvalidRequest, with demand and supply printed, when the replicas cannot all be placed.

    Packs replicas that few nodes could hold first, of those the largest, each onto the fullest node
    that still has room, which leaves whole nodes for other large ones.
    """
    free = [(node, dict(node.resources)) for node in nodes]
    wanted = [demand for demand in demands for _ in range(demand.replicas)]
    placed: dict[str, int] = {demand.pool: 0 for demand in demands}

    def order(demand: Demand) -> tuple[int, float]:
        need = demand.total()
        able = [n for n in nodes if n.carries(demand.labels) and _holds(n.resources, need)]
        return len(able), -sum(need.values())

    for demand in sorted(wanted, key=order):
        need = demand.total()
        offers = [left for node, left in free if node.carries(demand.labels)]
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
    """Whether a node that offers so much has room; as Ray counts, in ten-thousandths."""
    return all(round(offer.get(name, 0.0) - amount, 4) >= 0 for name, amount in need.items())


def demands_of(config: ClusterConfig) -> tuple[Demand, ...]:
    """What each pool asks of Ray."""
    router = config.router
    wishes = [("router", router.replicas, router.placement, 1)]
    for role in Role:
        pool = config.pool(role)
        wishes.append((role.value, pool.replicas, pool.placement, pool.engine.tp_size))
    return tuple(
        Demand(
            pool=name,
            replicas=replicas,
            bundles=(placement.bundle(),) * ranks,
            labels=placement.labels,
        )
        for name, replicas, placement, ranks in wishes
    )


def _refuse(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {message}", param=path)


def check_ports(config: ClusterConfig) -> None:
    """Raise InvalidRequest when so many routers cannot have the ports they are to listen on."""
    network = config.network
    seen: dict[int, str] = {}
    for name in ("http_port", "grpc_port", "metrics_port"):
        port = getattr(network, name)
        if port and port in seen:  # they would share it, as routers do
            raise _refuse(f"network.{name}", f"is the same as network.{seen[port]} ({port})")
        seen[port] = name
    for name in ("http_port", "grpc_port"):
        if getattr(network, name) == 0 and config.router.replicas > 1:
            raise _refuse(
                f"network.{name}",
                "must be given when router.replicas is more than 1: they share it",
            )
    if network.metrics_port and config.router.replicas > 1 and config.ray.local:
        raise _refuse("network.metrics_port", "must be 0 when one machine has more than one router")
    if config.router.replicas > 1 and not config.router.settings.reuse_port:
        raise _refuse(
            "router.settings.reuse_port", "must be true when router.replicas is more than 1"
        )


def _check_files(config: ClusterConfig) -> None:
    """The files that routers read at their start."""
    settings = config.router.settings
    try:
        Tls(settings.tls)
        KeyFile(settings.api_keys_file, tiers=frozenset(settings.service_tiers))
        if settings.chat_template:
            chosen_source(settings.chat_template)
    except ValueError as error:
        name, _, fault = str(error).partition(" ")
        raise _refuse(f"router.settings.{name}", fault) from None


def check_devices(config: ClusterConfig, roles: Sequence[Role] = tuple(Role)) -> None:
    """Raise InvalidRequest when the pools of these roles cannot run where they are to, or not
    together."""
    for role in roles:
        _check_device(config.pool(role), role.value, config.transfer.backend)
    devices = {role: config.pool(role).engine.device for role in roles}
    if len(set(devices.values())) > 1:
        raise _refuse(
            "prefill.engine.device",
            f"is {devices[Role.PREFILL]!r}, but decode.engine.device is "
            f"{devices[Role.DECODE]!r}: KV is handed over between devices of one kind",
        )


def _check_length(config: ClusterConfig, model: ModelConfig) -> None:
    wanted, limit = config.model.max_model_len, model.max_position_embeddings
    if wanted is not None and wanted < 2:
        raise _refuse("model.max_model_len", f"must be at least 2, got {wanted}")
    if wanted is not None and wanted > limit:
        raise _refuse("model.max_model_len", f"{wanted} is more than the model's {limit}")


def _check_pool(config: ClusterConfig, role: Role, model: ModelConfig) -> None:
    pool = config.pool(role)
    where = role.value
    try:
        config.engine_config(role, Path(config.model.name))
    except BatonError as error:  # the engine's own check of what the model section says
        raise _refuse(f"model.{error.param}", error.message) from error
    allowed = allowed_degrees(model)
    if pool.engine.tp_size not in allowed:
        raise _refuse(
            f"{where}.engine.tp_size",
            f"{pool.engine.tp_size} does not suit {model.num_heads} query and "
            f"{model.num_kv_heads} KV heads; allowed: {', '.join(map(str, allowed))}",
        )


def _check_device(pool: PoolSection, where: str, backend: BackendName) -> None:
    on_gpu, gpus = pool.engine.device == "cuda", pool.placement.gpus
    if not on_gpu and pool.engine.device != "cpu":
        raise _refuse(
            f"{where}.engine.device",
            f"must be 'cpu' or 'cuda' (Ray picks the GPU), got {pool.engine.device!r}",
        )
    if on_gpu and not 0 < gpus <= 1:
        raise _refuse(
            f"{where}.placement.gpus",
            f"must be 1 for each rank on device cuda, or the share of one, got {gpus}",
        )
    sized = pool.engine.kv_memory_bytes is not None or pool.engine.num_blocks is not None
    if on_gpu and gpus < 1 and not sized:
        raise _refuse(
            f"{where}.engine.kv_memory_bytes",
            f"must be set where workers share a GPU (placement.gpus is {gpus}): what is free "
            "would be taken by the first",
        )
    if not on_gpu and backend in (BackendName.NCCL, BackendName.CUDA_IPC):
        raise _refuse(
            "transfer.backend", f"{backend} needs GPUs, but {where}.engine.device is 'cpu'"
        )
    if on_gpu and backend is BackendName.GLOO:
        raise _refuse(
            "transfer.backend", f"{backend} needs CPUs, but {where}.engine.device is 'cuda'"
        )
    if not on_gpu and gpus:
        raise _refuse(
            f"{where}.placement.gpus", f"is {gpus}, but the device is {pool.engine.device!r}"
        )


def _shortage(demand: Demand, number: int, demands: Sequence[Demand], nodes: Sequence[Node]) -> str:
    need = demand.total()
    labels = "".join(f" labelled {name}={value}" for name, value in demand.labels.items())
    lines = [
        f"replica {number} of {demand.replicas} finds no node{labels} with "
        f"{_shown(need)} free on it ({len(demand.bundles)} rank(s) that must share a node)",
        "  demand: "
        + "; ".join(f"{d.pool} {d.replicas} x {_shown(d.total())}" for d in demands if d.replicas),
        "  supply: "
        + "; ".join(f"node {i}: {_offer(node, need, demand)}" for i, node in enumerate(nodes)),
    ]
    return "\n".join(lines)


def _offer(node: Node, need: Bundle, demand: Demand) -> str:
    found = _shown(node.resources, need)
    own = [f"{name}={node.labels.get(name, 'none')}" for name in demand.labels]
    return " ".join([found, *own])


def _shown(amounts: Bundle, only: Mapping[str, float] | None = None) -> str:
    names = only if only is not None else amounts
    return ", ".join(f"{name} {amounts.get(name, 0.0):g}" for name in names) or "nothing"
