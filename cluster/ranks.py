"""Tensor-parallel followers: one Ray actor per rank above 0, in the replica's placement group."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig, PoolSection


class FollowerRank:
    """The actor's body. It lives as long as its replica: Ray ends it with its owner and its group,
    and `follow_rank` returns when rank 0 is gone."""

    def prepare(self) -> None:
        """Import what loading needs, while rank 0 does the same."""
        import worker_runtime.ranks  # noqa: F401

    def run(self, *args: Any) -> None:
        """Load the shard and obey rank 0 to the end; arguments of `follow_rank`."""
        from worker_runtime.ranks import follow_rank

        follow_rank(*args)


def process_env(pool: PoolSection) -> dict[str, str]:
    """Environment of a pool's processes. Thread counts must be known before torch is imported."""
    env = {"TOKENIZERS_PARALLELISM": "false"}
    threads = pool.engine.num_threads
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return env | dict(pool.placement.env)


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
            runtime_env={"env_vars": process_env(pool)},
        ).remote()
        handle.prepare.remote()
        followers.append(handle)
    return followers
