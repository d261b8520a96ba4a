"""A worker's step loop on an engine of one or several ranks, each in a process of its own.

Apart from `tests.support.engine`, for those processes need no transformers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.executor import build_executor, build_follower
from engine.ranks.group import RankGroup
from engine.ranks.messages import RankInvite
from protocol.sampling import SamplingParams
from tests.support.steps import served


def follow(invite: RankInvite, rank: int, settings: EngineConfig) -> None:
    """The whole life of a follower."""
    build_follower(invite, rank, settings).follow({})


def lead(
    settings: EngineConfig, requests: Sequence[tuple[list[int], SamplingParams]]
) -> tuple[list[list[int]], int, list[int | None]]:
    """The outputs, how many preemptions there were, and how the followers ended."""
    size = settings.tp_size
    group = RankGroup(size) if size > 1 else None
    processes = []
    if group is not None:
        spawn = multiprocessing.get_context("spawn")
        processes = [
            spawn.Process(target=follow, args=(group.invite, rank, settings), daemon=True)
            for rank in range(1, size)
        ]
    for process in processes:
        process.start()
    executor = build_executor(settings, group)
    try:
        executor.warmup()
        got, num_preemptions = asyncio.run(
            served(executor, executor.layout, executor.fingerprint, requests)
        )
    finally:
        if group is not None:
            group.close()
        executor.close()
        for process in processes:
            process.join(60)
    return got, num_preemptions, [process.exitcode for process in processes]
