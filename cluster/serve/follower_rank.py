"""Tensor-parallel followers: one Ray actor per rank above 0, in the replica's placement group."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config.schema import ClusterConfig, PoolSection
from cluster.serve.gc_tuning import settle_heap
from engine.config import EngineConfig
from kv_transfer.config import TransferConfig

if TYPE_CHECKING:
    from engine.ranks.messages import RankInvite  # imports torch: not for those who only deploy

#: Ray shows a process its own GPU only. Ranks that reduce through each other's memory are told
#: apart by their GPU's index, so all ranks of a worker must see the same GPUs.
_SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class FollowerRank:
    """The actor's body. It lives as long as its replica: Ray ends it with its owner and its group,
    and `follow_rank` returns when rank 0 is gone."""

    def prepare(self) -> None:
        """Import what loading needs, while rank 0 does the same."""
        import worker_runtime.ranks  # noqa: F401

    def run(
        self, invite: RankInvite, rank: int, engine: EngineConfig, transfer: TransferConfig
    ) -> None:
        """Load the shard and obey rank 0 to the end; arguments of `follow_rank`."""
        from worker_runtime.ranks import follow_rank

        follow_rank(invite, rank, on_own_gpu(engine), transfer, loaded=settle_heap)


def process_env(pool: PoolSection) -> dict[str, str]:
    """Environment of a pool's processes. Thread counts must be known before torch is imported."""
    env = {"TOKENIZERS_PARALLELISM": "false"}
    threads = pool.engine.num_threads
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if pool.placement.gpus and pool.engine.tp_size > 1:
        env |= _SEE_ALL_GPUS
    return env | dict(pool.placement.env)


def runtime_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Ray's description of a process that has this environment."""
    described: dict[str, Any] = {"env_vars": dict(env)}
    if quote(sys.executable) != sys.executable:  # which Ray puts into a line for bash as it is
        described["py_executable"] = quote(sys.executable)
    return described


def on_own_gpu(engine: EngineConfig) -> EngineConfig:
    """`engine` on the GPU that Ray set aside for this process; unchanged without one."""
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not gpus:
        return engine
    index = gpu_index(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return replace(engine, device=f"cuda:{index}")


def gpu_index(gpus: Sequence[str], visible: str | None) -> int:
    """CUDA's number, in this process, of its one GPU. Ray names GPUs as CUDA_VISIBLE_DEVICES does
    (numbers or UUIDs), and by their number on the node where that is not set."""
    (gpu,) = gpus
    return visible.split(",").index(gpu) if visible else int(gpu)


def start_followers(config: ClusterConfig, pool: PoolSection) -> list[Any]:
    """One actor per rank above 0, in bundles 1, 2, ... of the calling replica's placement group."""
    count = pool.engine.tp_size - 1
    if count == 0:
        return []
    group = ray.util.get_current_placement_group()
    actor = ray.remote(FollowerRank)
    followers = []
    for rank in range(1, count + 1):
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=rank
        )
        bundle = pool.placement.bundle()
        handle = actor.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=0,
            runtime_env=runtime_env(process_env(pool)),
        ).remote()
        handle.prepare.remote()
        followers.append(handle)
    return followers
