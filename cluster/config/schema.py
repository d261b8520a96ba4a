"""The cluster's configuration: each section is a frozen dataclass, most owned by the package
they configure. A value that several sections need is given once, in `model`, `network` or
`lifecycle`, and copied into them; DERIVED lists those fields, which are refused elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from engine.config import EngineConfig
from framing.ports import parse_ports
from kv_tiers.config import TierConfig
from kv_transfer.config import TransferConfig
from protocol.ids import Role
from router.config import RouterConfig
from worker_runtime.config import WorkerConfig

S = TypeVar("S", EngineConfig, RouterConfig)
AUTO = "auto"
#: Placeholder of a required field that is derived from another section.
UNRESOLVED = "unresolved"
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """What is served.

    name: of a fetched model, or the path of a model folder. served_name: the name clients use; the
    folder's name when empty. aliases: further names.
    dtype: of activations, of weights that are not quantised, and of KV, in both pools. kv_dtype:
    `fp8` keeps KV as e4m3 codes, half as many bytes; `decode.engine.kv_dtype` does so in one pool.
    quantization: what the weights of an unquantised checkpoint become at load, `fp8`, `int8` or
    `int4`, in pools whose engine does not say otherwise. max_model_len: longest prompt plus output,
    in tokens; None takes the model's own limit. kv_family: a name, if pools may share KV although
    their weights differ in precision; prefill in fp8 and decode in int4 of one model, for example.
    """

    name: str
    served_name: str = ""
    aliases: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    quantization: str | None = None
    kv_family: str = ""
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSection:
    """Where the front ends listen and how workers reach each other.

    host: address of the front ends. http_port, grpc_port: 0 lets the system choose (one router
    replica only). metrics_port: where each router serves its own metrics, besides /metrics on the
    shared http_port; 0 lets the system choose, and /metrics/targets and `baton status` show it;
    any other port needs one machine per router. worker_host: address of workers' control and
    transfer ports; `auto` takes the node's own. worker_ports: LOW-HIGH, the range of these and of
    routers' metrics; empty: the system chooses. A worker takes one for each rank and one more.
    """

    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 9000
    metrics_port: Port = 0
    worker_host: str = "127.0.0.1"
    worker_ports: str = ""

    def __post_init__(self) -> None:
        if self.worker_host.strip("[]") in ("", "0.0.0.0", "::"):  # other workers connect to it
            raise ValueError(
                f"worker_host must be one address of a node, or 'auto', got {self.worker_host!r}"
            )
        if self.worker_ports:
            try:
                parse_ports(self.worker_ports)
            except ValueError as error:
                raise ValueError(f"worker_ports {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    """What Ray reserves for each rank of a worker replica, or for a router replica.

    cpus: logical CPUs, for placement only (thread counts set the real use). gpus: 1 on device
    cuda, or the share of one (then set the engine's kv_memory_bytes); else 0. memory_bytes: of the
    node's memory; None reserves none.
    resources: custom Ray resources by name. labels: node labels that must match, so that each pool
    keeps to its own nodes. env: environment variables of the processes, set before any import.
    """

    cpus: Annotated[float, Meta(ge=0)] = 1.0
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    memory_bytes: PositiveCount | None = None
    resources: dict[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """The Ray bundle of one rank."""
        bundle: dict[str, float] = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        if self.memory_bytes is not None:
            bundle["memory"] = float(self.memory_bytes)
        return {name: amount for name, amount in bundle.items() if amount > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSection:
    """One pool of workers: how many, on what, and how each is built.

    replicas: at the start. max_replicas: the pool follows its load between min_replicas and this
    (section scaling); None: it keeps its size, which `baton scale` changes.
    model: name or folder of this pool's own checkpoint, `model.name` in another precision; empty:
    that one.
    """

    replicas: Count = 1
    model: str = ""
    min_replicas: Count = 1
    max_replicas: PositiveCount | None = None
    placement: PlacementSection = field(default_factory=PlacementSection)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model_path=UNRESOLVED))
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    tiers: TierConfig = field(default_factory=TierConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSection:
    """How autoscaled pools (max_replicas) follow their load.

    gpus: budget of both pools together; None: their bounds alone count. ttft_s: prefill grows when
    prompts wait longer for it. decode_step_s: decode grows when steps without prompts get longer.
    interval_s: between two looks at the load. keep_s, keep_starts: a worker is kept so long after
    it was last needed, and at least so many times what a start takes.
    roles: workers of pools that keep their size change between prefill and decode with the load, so
    that at least min_replicas are left in each role. role_cost_s: what a change costs, as seconds
    for which one role has twice the load that it can bear; a load that flickers changes nothing.
    """

    gpus: Annotated[float, Meta(gt=0)] | None = None
    ttft_s: Seconds = 1.0
    decode_step_s: Seconds = 0.05
    interval_s: Seconds = 1.0
    keep_s: Seconds = 60.0
    keep_starts: Annotated[float, Meta(ge=0)] = 10.0
    roles: bool = False
    role_cost_s: Seconds = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSection:
    """The routers: how many, on what, and their settings."""

    replicas: PositiveCount = 1
    placement: PlacementSection = field(default_factory=PlacementSection)
    settings: RouterConfig = field(default_factory=lambda: RouterConfig(model_path=UNRESOLVED))


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleSection:
    """Times of joining, leaving and failing, in seconds.

    heartbeat_s: interval of a replica's reports to the directory. expiry_s: a replica without a
    report for this long is removed. health_period_s, health_timeout_s: Serve's health checks; three
    failures replace the replica. drain_s: how long a stopping worker may finish its requests.
    start_timeout_s: how long `baton up` waits for all pools to be ready.
    """

    heartbeat_s: Seconds = 1.0
    expiry_s: Seconds = 6.0
    health_period_s: Seconds = 1.0
    health_timeout_s: Seconds = 10.0
    drain_s: Seconds = 60.0
    start_timeout_s: Seconds = 600.0

    def __post_init__(self) -> None:
        if self.expiry_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"expiry_s must be at least twice heartbeat_s ({self.heartbeat_s}), "
                f"got {self.expiry_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySection:
    """The Ray cluster to use.

    address: `local` starts one on this machine and owns it; `auto` finds a running one; or
    `host:port`. autoscaling: Ray adds nodes on demand, so a demand beyond the present nodes is no
    error. num_cpus: logical CPUs of a local cluster; None offers plenty, because thread counts set
    what CPU workers really use. object_store_bytes: of a local cluster (Baton hardly uses it).
    """

    address: str = "local"
    autoscaling: bool = False
    num_cpus: PositiveCount | None = None
    object_store_bytes: int = 100 << 20

    @property
    def local(self) -> bool:
        """Whether Baton starts and owns the Ray cluster."""
        return self.address == "local"

    def __post_init__(self) -> None:
        if not self.address:
            raise ValueError("address must be 'local', 'auto' or host:port")
        if self.object_store_bytes < 80 << 20:
            raise ValueError(
                f"object_store_bytes must be at least 80 MiB, got {self.object_store_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Everything `baton up` needs to know."""

    model: ModelSection
    prefill: PoolSection = field(default_factory=PoolSection)
    decode: PoolSection = field(default_factory=PoolSection)
    router: RouterSection = field(default_factory=RouterSection)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    network: NetworkSection = field(default_factory=NetworkSection)
    lifecycle: LifecycleSection = field(default_factory=LifecycleSection)
    scaling: ScalingSection = field(default_factory=ScalingSection)
    ray: RaySection = field(default_factory=RaySection)

    def pool(self, role: Role) -> PoolSection:
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def autoscaled(self) -> tuple[Role, ...]:
        """The pools that follow their load."""
        return tuple(role for role in Role if self.pool(role).max_replicas is not None)

    def gpus_of(self, role: Role) -> float:
        """GPUs of one worker."""
        pool = self.pool(role)
        return pool.placement.gpus * pool.engine.tp_size

    @property
    def anonymous(self) -> bool:
        """Whether anyone on the network may call the front ends, without key or certificate."""
        settings = self.router.settings
        authenticated = settings.api_keys_file or settings.tls.client_ca_file
        return not (authenticated or is_loopback(self.network.host))

    def model_name(self, role: Role) -> str:
        """Name or folder of the checkpoint that a pool loads."""
        return self.pool(role).model or self.model.name

    def engine_config(self, role: Role, model_path: Path) -> EngineConfig:
        pool = self.pool(role)
        engine = self._completed(pool.engine, pool, model_path=str(model_path))
        return replace(
            engine,
            quantization=engine.quantization or self.model.quantization,
            kv_dtype=engine.kv_dtype or self.model.kv_dtype,
        )

    def worker_config(self, role: Role, host: str, *, home: Role | None = None) -> WorkerConfig:
        """The settings of a role on a worker of the pool `home` (None: the role's own), within what
        the engine there was built for."""
        own = self.pool(role).worker
        built = self.pool(home or role).worker
        max_tokens = min(own.max_num_batched_tokens, built.max_num_batched_tokens)
        return replace(
            own,
            host=host,
            ports=self.network.worker_ports,
            max_num_seqs=min(own.max_num_seqs, built.max_num_seqs),
            max_num_batched_tokens=max_tokens,
            fill_tokens=min(own.fill_tokens, max_tokens),
        )

    def transfer_config(self, host: str) -> TransferConfig:
        return replace(self.transfer, host=host, ports=self.network.worker_ports)

    def router_config(self, model_path: Path) -> RouterConfig:
        """The routers' settings, completed. Anonymous callers get no Admin service."""
        settings = self.router.settings
        return self._completed(
            replace(settings, admin_enabled=settings.admin_enabled and not self.anonymous),
            self,
            model_path=str(model_path),
            served_model_name=self.model.served_name or model_path.name,
        )

    def _completed(self, settings: S, pool: object, **known: str) -> S:
        """`settings` with the derived fields, except those `known`, from the paths in DERIVED."""
        derived: dict[str, Any] = {
            field: attrgetter(path[1:])(pool) if path.startswith(".") else attrgetter(path)(self)
            for (owner, field), path in DERIVED.items()
            if isinstance(settings, owner)
        }
        return replace(settings, **derived | known)


#: Fields set by another section: (class, field) -> path of the field that sets it; a path that
#: begins with a dot is in the same pool.
DERIVED: dict[tuple[type, str], str] = {
    (EngineConfig, "model_path"): "model.name",
    (EngineConfig, "dtype"): "model.dtype",
    (EngineConfig, "kv_family"): "model.kv_family",
    (EngineConfig, "max_model_len"): "model.max_model_len",
    (EngineConfig, "max_step_tokens"): ".worker.max_num_batched_tokens",
    (EngineConfig, "max_running"): ".worker.max_num_seqs",
    (RouterConfig, "model_path"): "model.name",
    (RouterConfig, "served_model_name"): "model.served_name",
    (RouterConfig, "model_aliases"): "model.aliases",
    (RouterConfig, "max_model_len"): "model.max_model_len",
    (RouterConfig, "drain_s"): "lifecycle.drain_s",
    (WorkerConfig, "host"): "network.worker_host",
    (WorkerConfig, "ports"): "network.worker_ports",
    (TransferConfig, "host"): "network.worker_host",
    (TransferConfig, "ports"): "network.worker_ports",
}
