"""What the processes of a tensor-parallel engine run: followers that answer calls, and a leader."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from engine.config import EngineConfig
from engine.executor import build_executor, build_follower
from engine.ranks.group import RankGroup
from engine.ranks.messages import RankInvite
from protocol import codec
from protocol.errors import NotFound


def follow(invite: RankInvite, rank: int, settings: EngineConfig) -> None:
    """The whole life of a follower."""
    torch.set_num_threads(1)
    later: list[Future[bytes]] = []

    def blocks_written(_: bytes) -> bytes:
        written = executor.pool.data.abs().sum(dim=(0, 2, 3, 4, 5)) > 0
        return b",".join(b"%d" % block for block in written.nonzero()[:, 0].tolist())

    def finish_later(payload: bytes) -> Future[bytes]:
        later.append(Future())
        if payload == b"now":
            for index, future in enumerate(later):
                future.set_result(b"%d" % index)
        return later[-1]

    def refuse(_: bytes) -> bytes:
        raise NotFound("no such thing", param="thing")

    executor = build_follower(invite, rank, settings)
    executor.follow(
        {
            "echo": lambda payload: b"%d:" % rank + payload,
            "blocks": blocks_written,
            "later": finish_later,
            "refuse": refuse,
            "crash": lambda _: bytes(1 // 0),
        }
    )


def lead(settings: EngineConfig, invite_box: Any, ready: Any) -> None:
    """Rank 0 of two in a process that will be killed."""
    torch.set_num_threads(1)
    group = RankGroup(2)
    invite_box.send_bytes(codec.encode(group.invite))
    executor = build_executor(settings, group)
    ready.set()
    while True:
        executor.warmup()
