"""The whole cluster's configuration: every section is a frozen dataclass, most of them owned by the
package that acts on them. What two sections must share is said once (`model`, `network`) and filled
into both, so it cannot differ; such fields are listed in DERIVED and refused anywhere else.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from cluster.config.tree import UNRESOLVED
from engine.config import EngineConfig
from kv_transfer.config import TransferConfig
from protocol.ids import Role
from router.config import RouterConfig
from worker_runtime.config import WorkerConfig

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """What is served. `name` is a fetched model's name or a path to a model folder.

    dtype: of weights, activations and KV, in both pools. max_model_len: longest prompt plus output;
    None takes the model's own.
    served_name: the name clients use; the folder's name when empty. `aliases` work too.
    """

    name: str
    served_name: str = ""
    aliases: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSection:
    """Where the front doors listen and how workers reach each other.

    host: address of the front doors. http_port, grpc_port: 0 lets the system choose (one router
    replica only). metrics_port: where each router answers scrapes for itself, besides /metrics of
    the shared http_port; 0 lets the system choose, and /metrics/targets and `baton status` tell;
    another one needs a machine for each router. worker_host: address of workers' control and
    transfer ports; `auto` takes the node's own.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 9000
    metrics_port: int = 0
    worker_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        for name in ("http_port", "grpc_port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be between 0 and 65535, got {getattr(self, name)}")
        if self.worker_host.strip("[]") in ("", "0.0.0.0", "::"):  # workers are called there
            raise ValueError(
                f"worker_host must be one address of a node, or 'auto', got {self.worker_host!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    """What Ray reserves for each rank of a replica (for a router: for the replica).

    cpus: logical CPUs, for placement only (what is used is set by thread counts). gpus: 1 on device
    cuda, or the share of one (then set the engine's kv_memory_bytes); else 0. memory_bytes: of the
    node's memory; None reserves none.
    resources: custom Ray resources by name. labels: node labels that must match, so that each pool
    keeps to its own nodes. env: environment of the processes, set before they import anything.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int | None = None
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(f"memory_bytes must be positive, got {self.memory_bytes}")
        for name, amount in self.resources.items():
            if amount <= 0:
                raise ValueError(f"resources must be positive, got {name}: {amount}")

    def bundle(self) -> dict[str, float]:
        """The Ray bundle of one rank."""
        bundle: dict[str, float] = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        if self.memory_bytes is not None:
            bundle["memory"] = float(self.memory_bytes)
        return {name: amount for name, amount in bundle.items() if amount > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSection:
    """One pool of workers: how many, on what, and how each is built."""

    replicas: int = 1
    placement: PlacementSection = field(default_factory=PlacementSection)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model_path=UNRESOLVED))
    worker: WorkerConfig = field(default_factory=WorkerConfig)

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ValueError(f"replicas must not be negative, got {self.replicas}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSection:
    """The routers: how many, on what, and their settings."""

    replicas: int = 1
    placement: PlacementSection = field(default_factory=PlacementSection)
    settings: RouterConfig = field(default_factory=lambda: RouterConfig(model_path=UNRESOLVED))

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleSection:
    """Times of joining, leaving and being missed, in seconds.

    heartbeat_s: how often a worker tells the directory that it lives. expiry_s: after this silence
    it is taken off. health_period_s, health_timeout_s: Serve's checks; three failures replace the
    replica. drain_s: how long a leaving worker may finish its requests. start_timeout_s: how long
    `baton up` waits for everything to be ready.
    """

    heartbeat_s: float = 1.0
    expiry_s: float = 6.0
    health_period_s: float = 1.0
    health_timeout_s: float = 10.0
    drain_s: float = 60.0
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.expiry_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"expiry_s must be at least twice heartbeat_s ({self.heartbeat_s}), "
                f"got {self.expiry_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySection:
    """The Ray cluster to use.

    address: `local` starts one on this machine and owns it; `auto` finds a running one; or
    `host:port`. autoscaling: nodes come when they are asked for, so that a demand beyond what is
    there now is no error. num_cpus: logical CPUs of a local one; None offers plenty, because what
    CPU workers really use is set by their thread counts. object_store_bytes: of a local one (Baton
    hardly uses it).
    """

    address: str = "local"
    autoscaling: bool = False
    num_cpus: int | None = None
    object_store_bytes: int = 100 << 20

    @property
    def local(self) -> bool:
        """Whether Baton starts and owns it."""
        return self.address == "local"

    def __post_init__(self) -> None:
        if not self.address:
            raise ValueError("address must be 'local', 'auto' or host:port")
        if self.num_cpus is not None and self.num_cpus < 1:
            raise ValueError(f"num_cpus must be at least 1, got {self.num_cpus}")
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
    ray: RaySection = field(default_factory=RaySection)

    def pool(self, role: Role) -> PoolSection:
        """The section of a role's pool."""
        return self.prefill if role is Role.PREFILL else self.decode

    def engine_config(self, role: Role, model_path: Path) -> EngineConfig:
        """A pool's engine, with what the model section decides filled in, and room for the largest
        step that the pool's workers may plan."""
        pool = self.pool(role)
        return dataclasses.replace(
            pool.engine,
            max_step_tokens=pool.worker.max_num_batched_tokens,
            max_running=pool.worker.max_num_seqs,
            model_path=str(model_path),
            dtype=self.model.dtype,
            max_model_len=self.model.max_model_len,
        )

    def worker_config(self, role: Role, host: str) -> WorkerConfig:
        """A pool's worker settings, on this address."""
        return dataclasses.replace(self.pool(role).worker, host=host)

    def transfer_config(self, host: str) -> TransferConfig:
        """The hand-off's settings, on this address."""
        return dataclasses.replace(self.transfer, host=host)

    def router_config(self, model_path: Path) -> RouterConfig:
        """A router's settings, with what the model section decides filled in."""
        return dataclasses.replace(
            self.router.settings,
            model_path=str(model_path),
            served_model_name=self.model.served_name or model_path.name,
            model_aliases=self.model.aliases,
            max_model_len=self.model.max_model_len,
            drain_s=self.lifecycle.drain_s,
        )


#: Fields filled in from elsewhere: (class, field) -> the path where they are set; one that begins
#: with a dot is of the same pool.
DERIVED: dict[tuple[type, str], str] = {
    (EngineConfig, "model_path"): "model.name",
    (EngineConfig, "dtype"): "model.dtype",
    (EngineConfig, "max_model_len"): "model.max_model_len",
    (EngineConfig, "max_step_tokens"): ".worker.max_num_batched_tokens",
    (EngineConfig, "max_running"): ".worker.max_num_seqs",
    (RouterConfig, "model_path"): "model.name",
    (RouterConfig, "served_model_name"): "model.served_name",
    (RouterConfig, "model_aliases"): "model.aliases",
    (RouterConfig, "max_model_len"): "model.max_model_len",
    (RouterConfig, "drain_s"): "lifecycle.drain_s",
    (WorkerConfig, "host"): "network.worker_host",
    (TransferConfig, "host"): "network.worker_host",
}
