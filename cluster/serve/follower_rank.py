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

from cluster.config.schema import PoolSection
from cluster.gc_tuning import freeze_heap
from engine.config import EngineConfig
from kv_tiers.config import TierConfig
from kv_transfer.config import TransferConfig

if TYPE_CHECKING:
    from engine.ranks.messages import RankInvite  # imports torch, which deploying does not need

#: By default Ray hides all GPUs but its own from a process. Ranks that reduce through each other's
#: memory address GPUs by index, so all ranks of a worker must see the same ones.
_SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class FollowerRank:
    """The actor's class. Ray ends it with its replica and placement group; `follow_rank` returns
    when rank 0 is gone."""

    def prepare(self) -> None:
        """Import what loading needs, while rank 0 does the same."""
        import worker_runtime.ranks  # noqa: F401

    def run(
        self,
        invite: RankInvite,
        rank: int,
        engine: EngineConfig,
        transfer: TransferConfig,
        tiers: TierConfig,
    ) -> None:
        from worker_runtime.ranks import follow_rank

        follow_rank(invite, rank, on_own_gpu(engine), transfer, tiers, loaded=freeze_heap)


def process_env(pool: PoolSection) -> dict[str, str]:
    """Environment of a pool's processes. Thread counts must be set before torch is imported."""
    env = {"TOKENIZERS_PARALLELISM": "false"}
    threads = pool.engine.num_threads
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if pool.placement.gpus and pool.engine.tp_size > 1:
        env |= _SEE_ALL_GPUS
    return env | dict(pool.placement.env)


def runtime_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Ray's description of a process with these environment variables."""
    described: dict[str, Any] = {"env_vars": dict(env)}
    if quote(sys.executable) != sys.executable:  # Ray puts the path into a bash command unquoted
        described["py_executable"] = quote(sys.executable)
    return described


def on_own_gpu(engine: EngineConfig) -> EngineConfig:
    """`engine` on the GPU that Ray reserved for this process; unchanged without one."""
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not gpus:
        return engine
    index = gpu_index(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return replace(engine, device=f"cuda:{index}")


def gpu_index(gpus: Sequence[str], visible: str | None) -> int:
    """CUDA's index, in this process, of its one GPU. Ray names a GPU as CUDA_VISIBLE_DEVICES does
    (number or UUID), or by its number on the node where that is not set."""
    (gpu,) = gpus
    return visible.split(",").index(gpu) if visible else int(gpu)


def start_followers(pool: PoolSection) -> list[Any]:
    """One actor per rank above 0, in bundles 1, 2, ... of the calling replica's placement group."""
    if pool.engine.tp_size == 1:
        return []
    group = ray.util.get_current_placement_group()
    bundle = pool.placement.bundle()
    followers = []
    for rank in range(1, pool.engine.tp_size):
        follower = (
            ray.remote(FollowerRank)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=rank
                ),
                max_restarts=0,
                runtime_env=runtime_env(process_env(pool)),
            )
            .remote()
        )
        follower.prepare.remote()
        followers.append(follower)
    return followers
